"""`phalanx doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from phalanx.launch.doctor.examine import Line

__all__ = ["doctor_command"]

_COLOURS = (("ok", "green"), ("info", "cyan"), ("warn", "yellow"), ("fail", "bold red"))


def doctor_command(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object.")] = False,
) -> None:
    """Look at this machine: what is installed, what its limits are, and what works.

    Two ranks are started for each backend, and what they compute is checked. Takes some seconds.
    The output can be pasted into a bug report: of a token it says only that it is set. The exit
    code is 1 if anything failed.

        phalanx doctor > report.md
    """
    from phalanx.launch.doctor.examine import as_markdown, examine  # noqa: PLC0415

    lines: list[Line] = []
    if as_json:
        lines.extend(examine())
        report = {"ok": _healthy(lines), "findings": [_flat(line) for line in lines]}
        typer.echo(json.dumps(report, indent=2))
    else:
        from rich.console import Console  # noqa: PLC0415

        console = Console(highlight=False, soft_wrap=True)
        if console.is_terminal:
            lines.extend(_show(console, examine()))
        else:
            lines.extend(examine())
            for text in as_markdown(lines):
                typer.echo(text)
        failed = sum(line.finding.status == "fail" for line in lines)
        typer.echo(f"\n{len(lines)} checks, {failed or 'none'} failed")
    raise typer.Exit(0 if _healthy(lines) else 1)


def _healthy(lines: list[Line]) -> bool:
    return all(line.finding.status != "fail" for line in lines)


def _flat(line: Line) -> dict[str, str]:
    return {"subject": line.subject, "check": line.check, **asdict(line.finding)}


def _show(console: Console, lines: Iterator[Line]) -> Iterator[Line]:
    """Show each line on a terminal when it comes, and pass it on."""
    from rich.markup import escape  # noqa: PLC0415

    colours = dict(_COLOURS)
    subject = ""
    for line in lines:
        if line.subject != subject:
            subject = line.subject
            console.print(f"\n[bold]{escape(subject)}[/bold]")
        status, finding = line.finding.status, line.finding
        mark = f"[{colours[status]}]{status:>4}[/{colours[status]}]"
        console.print(f"{mark}  {escape(line.check):16} {escape(finding.what)}")
        if finding.hint:
            console.print(f"{'':22} {escape(finding.hint)}", style="dim")
        yield line
