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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli import bench, kubernetes, slurm, watch
from phalanx.cli.checkpoint import checkpoint_app
from phalanx.errors import MisuseError
from phalanx.launch.command import run_command

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.ops.machine import Finding
    from phalanx.ops.observe.doctor import Check

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
app.command("run", context_settings={"allow_interspersed_args": False})(run_command)


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

    A job that runs with `PHALANX_TRACE=FOLDER` in its environment writes there what each rank did
    when. The merged trace opens in https://ui.perfetto.dev and in chrome://tracing.

        PHALANX_TRACE=traces phalanx run -n 4 train.py

        phalanx trace traces --html

    The page shows what each rank did when, for whom the others waited, how much of communication
    was overlapped with computing, and the slowest operations.
    """
    from rich.console import Console  # noqa: PLC0415 -- other commands need none of it
    from rich.table import Table  # noqa: PLC0415

    from phalanx.ops.observe.trace import page  # noqa: PLC0415
    from phalanx.ops.observe.trace.merged import merge, merged_file  # noqa: PLC0415
    from phalanx.ops.observe.trace.profile import STATES  # noqa: PLC0415

    path = merged_file(folder, output)
    html = page.page_beside(path) if as_html else None
    png = page.picture_beside(path) if as_png else None
    merged = merge(folder, output)
    table = Table(box=None, pad_edge=False)
    times = "waiting s", "communicating s"
    for name in ("rank", "operations", "MiB", *times, "errors", "last", "by s"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in merged.ranks:
        seconds = dict(zip(STATES, merged.profile.ranks[rank.rank].totals(), strict=True))
        table.add_row(
            str(rank.rank),
            str(rank.operations),
            f"{rank.bytes / (1 << 20):.1f}",
            f"{seconds['waiting']:.3f}",
            f"{seconds['communicating']:.3f}",
            str(rank.errors),
            str(rank.last),
            f"{rank.late:.3f}",
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
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
app.command("watch", help=watch.__doc__, cls=watch.WatchCommand)(watch.watch_command)
app.command("bench", help=bench.__doc__)(bench.bench_command)
app.command(
    "kubernetes",
    help=kubernetes.__doc__,
    context_settings={"allow_interspersed_args": False},
)(kubernetes.kubernetes_command)
app.command("slurm", help=slurm.__doc__, context_settings={"allow_interspersed_args": False})(
    slurm.slurm_command
)

_COLOURS: Mapping[str, str] = MappingProxyType(
    {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
)


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
