"""`python -m phalanx.launch` is `phalanx run`, without the other commands of `phalanx`."""

from __future__ import annotations

import typer

from phalanx.launch.command import run_app, run_command

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
app.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)(run_command)

run_app(app, "python -m phalanx.launch")
