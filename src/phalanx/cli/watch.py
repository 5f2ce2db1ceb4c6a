"""Show a job while it runs: what each rank does, who is slowest, who waits for whom.

Without an argument it is your job that runs on this host under phalanx run; where there are several
it lists them. For a job of another launcher, or in another place, start it with
PHALANX_WATCH=FOLDER in its environment, a folder of its own, and name that. It may be opened and
closed at any time; ranks publish what they do while somebody watches, and only then.

    phalanx watch

    phalanx watch runs/a/watch

    phalanx watch --once
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def watch_command(
    *,
    place: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="What PHALANX_WATCH named for the job.")
    ] = "",
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Print one state, and end; also where the output is no terminal."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="For programs: one line for each state, to the end; with --once one."
        ),
    ] = False,
) -> None:
    """Run `phalanx watch`, whose help is this module's docstring."""
    from rich.console import Console  # noqa: PLC0415 -- other commands need none of it

    from phalanx.errors import MisuseError  # noqa: PLC0415
    from phalanx.tools.watch import gather, terminal  # noqa: PLC0415

    read = gather.find_job(place)
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = terminal.WIDE_ENOUGH
    if once or not (console.is_terminal or as_json):
        state = gather.snapshot(read)
        if state is None:
            raise MisuseError(f"nothing is published in {place or 'its folder'}: is the job over?")
        typer.echo(terminal.as_json(state)) if as_json else terminal.print_once(state, console)
        return
    try:
        if as_json:
            for state in gather.follow(read):
                typer.echo(terminal.as_json(state))
                sys.stdout.flush()
        elif terminal.show(gather.follow(read), console) is None:
            raise MisuseError(f"nothing is published in {place}: is the job over?")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
