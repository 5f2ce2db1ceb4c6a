"""The `phalanx` command: its options, and the commands under it; `main.py` runs it.

Nothing here imports torch: a command does, when it runs.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from phalanx.cli.bench import BENCH_HELP, bench_command
from phalanx.cli.commands import doctor_command, run_command, trace_command

__all__ = ["app"]

app = typer.Typer(
    name="phalanx",
    help="Train PyTorch models across ranks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if not wanted:
        return
    for package in ("phalanx", "torch"):
        try:
            typer.echo(f"{package} {version(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} (not installed as a package)")
    raise typer.Exit


@app.callback()
def _options(
    wanted: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the versions, and end."
        ),
    ] = False,
) -> None:
    """Train PyTorch models across ranks."""


# Everything after the script is the script's, whatever it looks like.
app.command("run", context_settings={"allow_interspersed_args": False})(run_command)
app.command("trace")(trace_command)
app.command("bench", help=BENCH_HELP)(bench_command)
app.command("doctor")(doctor_command)
