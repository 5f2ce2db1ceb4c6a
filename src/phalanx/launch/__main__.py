"""`python -m phalanx.launch` is `phalanx run`, without the other commands of `phalanx`."""

from __future__ import annotations

import sys

import typer

from phalanx.errors import DistributedError
from phalanx.launch.command import run_command

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
app.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)(run_command)

try:
    app(prog_name="python -m phalanx.launch")
except DistributedError as error:
    sys.stderr.write(f"phalanx: {error}\n")
    raise SystemExit(2) from None
