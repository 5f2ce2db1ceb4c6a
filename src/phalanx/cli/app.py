"""The `phalanx` command: its options, and the commands under it; `main.py` runs it.

Nothing here imports torch: a command does, when it runs.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand
from typing_extensions import override

from phalanx.cli.bench import bench_command
from phalanx.cli.checkpoint import checkpoint_app
from phalanx.cli.clusters import kubernetes_command, slurm_command
from phalanx.errors import MisuseError
from phalanx.launch.command import run_command

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.ops.machine import Finding
    from phalanx.ops.observe.doctor import Check
    from phalanx.ops.observe.watch.state import JobState

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
    from phalanx.ops.machine import installed_version  # noqa: PLC0415

    for package in ("phalanx", "torch"):
        typer.echo(f"{package} {installed_version(package) or '(not installed as a package)'}")
    raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    wanted: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the versions, and end."
        ),
    ] = False,
) -> None:
    """Train PyTorch models across ranks."""
    if context.invoked_subcommand != "run" and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Every word after the script is the script's, even one that looks like an option.
SCRIPT_LAST = {"allow_interspersed_args": False}
app.command("run", context_settings=SCRIPT_LAST)(run_command)


@app.command("token")
def token_command() -> None:
    """Make a token, by which the hosts of a job know each other, and print it.

        phalanx token > job.token

    Copy the file to every host, and set PHALANX_TOKEN_FILE=job.token there. Only its owner can read
    the file: its mode becomes 0600, whatever the shell has made it with, before the token is in it.
    """
    output = os.fstat(sys.stdout.fileno())
    if stat.S_ISREG(output.st_mode):
        try:
            os.fchmod(sys.stdout.fileno(), 0o600)
        except OSError as error:
            raise MisuseError(
                f"phalanx token: the file cannot be closed to others ({error.strerror}): write to "
                "one that is yours"
            ) from error
    typer.echo(secrets.token_hex(32))


_TRACE_COLUMNS = {
    "operations": "collectives and messages of this rank",
    "MiB": "size of the tensors that they were given",
    "waiting s": "seconds in collectives that another rank had not begun yet",
    "communicating s": "other seconds that it was blocked in operations",
    "errors": "operations that ended with an error",
    "last": "collectives that this rank was the last one to begin",
    "by s": "seconds that it began these later than the rank before it",
}


@app.command("trace")
def trace_command(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What PHALANX_TRACE named when the job ran.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Instead of FOLDER/merged.json."),
    ] = None,
    as_html: Annotated[
        bool,
        typer.Option(
            "--html",
            help="Also write a page that sums it up, beside it: merged.html. It needs no network.",
        ),
    ] = False,
    as_png: Annotated[
        bool,
        typer.Option(
            "--png", help="Also write a picture: merged.png. Needs pip install 'phalanx[plot]'."
        ),
    ] = False,
) -> None:
    """Merge the traces of a job's ranks into one, and sum them up.

    A job that runs with `PHALANX_TRACE=FOLDER` in its environment leaves there what each rank did
    when. The merged trace opens in https://ui.perfetto.dev and in chrome://tracing.

        PHALANX_TRACE=traces phalanx run -n 4 train.py

        phalanx trace traces --html

    The page shows what each rank did when, for whom the others waited, how much of communication
    was overlapped with computing, and the slowest operations. Below the table that is printed
    stands the meaning of each column.
    """
    from rich.console import Console  # noqa: PLC0415 -- other commands need none of it
    from rich.table import Table  # noqa: PLC0415

    from phalanx.ops.observe.trace import page  # noqa: PLC0415
    from phalanx.ops.observe.trace.merged import merge, merged_file  # noqa: PLC0415

    path = merged_file(folder, output)
    html = page.beside(path, ".html") if as_html else None
    png = page.beside(path, ".png") if as_png else None
    merged = merge(folder, output)
    table = Table(box=None, pad_edge=False)
    for name in ("rank", *_TRACE_COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in merged.ranks:
        size, late = f"{rank.bytes / (1 << 20):.1f}", f"{rank.late:.3f}"
        _, _, *waits = (f"{seconds:.3f}" for seconds in rank.totals())
        cells = (rank.rank, rank.operations, size, *waits, rank.errors, rank.last, late)
        table.add_row(*map(str, cells))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for name, meaning in _TRACE_COLUMNS.items():
        console.print(f"{name:17}{meaning}", style="dim")
    console.print(page.verdict(merged), markup=False)
    for note in merged.notes:
        console.print(f"Note: {note}", markup=False)
    console.print(f"{merged.path}: open it in https://ui.perfetto.dev", markup=False)
    if html is not None:
        page.write_page(merged, html)
        console.print(f"{html}: open it in a browser", markup=False)
    if png is not None:
        page.write_picture(merged, png)
        console.print(f"{png}: the picture", markup=False)


app.add_typer(checkpoint_app, name="checkpoint")


class WatchCommand(TyperCommand):
    """The command, with `--web` that may stand without a port: 0 then, for any that is free."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [
            "--web=0" if word == "--web" and not "".join(args[at : at + 1]).isdecimal() else word
            for at, word in enumerate(args, 1)
        ]
        return super().parse_args(ctx, words)


@app.command("watch", cls=WatchCommand)
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
            max=65535,
            help="Serve a page on this host's loopback, at a free port if none is given.",
        ),
    ] = None,
) -> None:
    """Show a job while it runs: what each rank does, who is slowest, who waits for whom.

    Without an argument it shows your job that runs on this host under phalanx run or phalanx.spawn.
    If there are several, it lists them. Start a job of another launcher with PHALANX_WATCH=FOLDER
    in its environment, a folder of its own, and name the folder here. Each host of a job of phalanx
    run shows all its ranks. To watch from elsewhere, start the job with PHALANX_WATCH=0.0.0.0:PORT
    and PHALANX_TOKEN, and name host:port of each host here, with the same token. Ranks publish what
    they do while somebody watches, and only then.

        phalanx watch

        phalanx watch runs/a/watch

        phalanx watch node1:9500 node2:9500

        phalanx watch --once

        phalanx watch --web

    With --web it is a page, for you on this host. Whoever has the printed address can open it.
    From another host, forward a port: ssh -L 8000:127.0.0.1:8000 HOST, with --web 8000.
    """
    from msgspec.json import encode  # noqa: PLC0415 -- other commands need none of these
    from rich.console import Console  # noqa: PLC0415

    from phalanx.ops.observe.watch import gather, terminal  # noqa: PLC0415

    if web is not None and (once or as_json):
        raise MisuseError("--web shows states on a page: leave --once and --json out")
    read = gather.find_job(*(places or ()))
    states = gather.follow(read)
    where = " ".join(places or ["its folder"])
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = terminal.WIDE_ENOUGH
    state: JobState | None = None  # the last one
    try:
        if web is not None:
            from phalanx.ops.observe.watch.web import serve  # noqa: PLC0415

            state = serve(states, web, ready=lambda at: typer.echo(f"{at}  (Ctrl-C ends it)"))
        elif once or not (console.is_terminal or as_json):
            state = gather.snapshot(read)
            if state is not None and as_json:
                typer.echo(encode(state))
            elif state is not None:
                console.print(terminal.picture(state, console.width))
        elif as_json:
            for state in states:
                typer.echo(encode(state))
        else:
            state = terminal.show(states, console)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if state is None:
        raise MisuseError(f"nothing is published in {where}: is the job over?")
    if web is not None:
        typer.echo(f"the job has ended: {state.ended}; pages that are open go on showing it")


app.command("bench")(bench_command)
app.command("kubernetes", context_settings=SCRIPT_LAST)(kubernetes_command)
app.command("slurm", context_settings=SCRIPT_LAST)(slurm_command)

_COLOURS = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}


@app.command("doctor")
def doctor_command(
    *, as_json: Annotated[bool, typer.Option("--json", help="For programs: one object.")] = False
) -> None:
    """Look at this machine: what is installed, what its limits are, and what works.

    Two ranks are started for each backend, and what they compute is checked. Takes some seconds.
    The output can be pasted into a bug report: of a token it says only that it is set. The exit
    code is 1 if anything failed.

        phalanx doctor > report.md
    """
    from phalanx.ops.observe.doctor import CHECKS  # noqa: PLC0415

    raise typer.Exit(run_checks(CHECKS, as_json=as_json))


def run_checks(checks: Sequence[Check], *, as_json: bool) -> int:
    """Run the checks; show each as it ends, or all as JSON; return the exit code.

    On a terminal stderr shows which check is under way.
    """
    from rich.console import Console  # noqa: PLC0415

    console, progress = Console(highlight=False, soft_wrap=True), Console(stderr=True)
    findings: list[dict[str, str]] = []
    section = ""
    for check in checks:
        with progress.status(f"{check.section}: {check.looks_at}"):
            finding = check.run()
        findings.append({"subject": check.section, "check": check.name, **asdict(finding)})
        if not as_json:
            _show_finding(console, check, finding, new_section=check.section != section)
        section = check.section
    failed = sum(finding["status"] == "fail" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "findings": findings}, indent=2))
    else:
        typer.echo(f"\n{len(findings)} checks, {failed or 'none'} failed")
    return 1 if failed else 0


def _show_finding(console: Console, check: Check, finding: Finding, *, new_section: bool) -> None:
    """Show one line: in colours on a terminal, as Markdown elsewhere."""
    from rich.markup import escape  # noqa: PLC0415

    from phalanx.ops.observe.doctor import as_markdown  # noqa: PLC0415

    if not console.is_terminal:
        if new_section:
            typer.echo(f"\n### {check.section}\n")
        typer.echo(as_markdown(check, finding))
        return
    if new_section:
        console.print(f"\n[bold]{escape(check.section)}[/bold]")
    colour = _COLOURS[finding.status]
    mark = f"[{colour}]{finding.status:>4}[/{colour}]"
    console.print(f"{mark}  {escape(check.name):16} {escape(finding.what)}")
    if finding.hint:
        console.print(f"{'':22} {escape(finding.hint)}", style="dim")
