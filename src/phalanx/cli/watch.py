"""Show a job while it runs: what each rank does, who is slowest, who waits for whom.

Without an argument it shows your job that runs on this host under phalanx run or phalanx.spawn. If
there are several, it lists them. Start a job of another launcher with PHALANX_WATCH=FOLDER in its
environment, a folder of its own, and name the folder here. Each host of a job of phalanx run shows
all its ranks. To watch from elsewhere, start the job with PHALANX_WATCH=0.0.0.0:PORT and
PHALANX_TOKEN, and name host:port of each host here, with the same token.
Ranks publish what they do while somebody watches, and only then.

    phalanx watch

    phalanx watch runs/a/watch

    phalanx watch node1:9500 node2:9500

    phalanx watch --once

    phalanx watch --web

With --web it is a page, for you on this host. Whoever has the printed address can open it. From
another host, forward a port: ssh -L 8000:127.0.0.1:8000 HOST, with --web 8000.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand
from typing_extensions import override

if TYPE_CHECKING:
    from phalanx.ops.observe.watch.nodes import Read
    from phalanx.ops.observe.watch.state import JobState

MOST_PORTS = 65535


class WatchCommand(TyperCommand):
    """The command, with `--web` that may stand without a port: 0 then, for any that is free."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [
            "--web=0" if word == "--web" and not "".join(args[at : at + 1]).isdecimal() else word
            for at, word in enumerate(args, 1)
        ]
        return super().parse_args(ctx, words)


def watch_command(
    *,
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER | HOST:PORT...]", help="What PHALANX_WATCH named for the job."
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one state, and end; also if the output is no terminal."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="For programs: one line for each state, to the end; with --once one."
        ),
    ] = False,
    web: Annotated[
        int | None,
        typer.Option(
            "--web",
            metavar="[PORT]",
            min=0,
            max=MOST_PORTS,
            help="Serve a page on this host's loopback, at a free port if none is given.",
        ),
    ] = None,
) -> None:
    """Run `phalanx watch`, whose help is this module's docstring."""
    from rich.console import Console  # noqa: PLC0415 -- other commands need none of it

    from phalanx.errors import MisuseError  # noqa: PLC0415
    from phalanx.ops.observe.watch import gather, terminal  # noqa: PLC0415

    if web is not None and (once or as_json):
        raise MisuseError("--web shows states on a page: leave --once and --json out")
    read = gather.find_job(*(places or ()))
    where = " ".join(places or ["its folder"])
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = terminal.WIDE_ENOUGH
    state: JobState | None = None  # the last one
    try:
        if web is not None:
            state = _serve(read, web)
        elif once or not (console.is_terminal or as_json):
            state = gather.snapshot(read)
            if state is not None and as_json:
                typer.echo(terminal.as_json(state))
            elif state is not None:
                terminal.print_once(state, console)
        elif as_json:
            for state in gather.follow(read):
                typer.echo(terminal.as_json(state))
                sys.stdout.flush()
        else:
            state = terminal.show(gather.follow(read), console)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if state is None:
        raise MisuseError(f"nothing is published in {where}: is the job over?")
    if web is not None:
        typer.echo(f"the job has ended: {state.ended}; pages that are open go on showing it")


def _serve(read: Read, port: int) -> JobState | None:
    """Show the job on a page until it has ended; return its last state."""
    from phalanx.ops.observe.watch import gather, web  # noqa: PLC0415

    def ready(address: str) -> None:
        typer.echo(f"{address}  (Ctrl-C ends it)")
        sys.stdout.flush()

    return web.serve(gather.follow(read), port, ready=ready)
