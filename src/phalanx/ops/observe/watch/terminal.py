"""A job's state as a table in the terminal.

    train.py: 4 ranks; slowest: rank 2; loss 1.613 (1.613 to 1.63)
    rank step s/step call           for s waits for wait last line
       0   43 0.0651 all_reduce #44   4.4 2         100% step 40
       1   43  0.062 all_reduce #44   4.5 2         100% step 40
     > 2   42  0.056 stopped                             process 4711 is stopped (SIGSTO...
       3   43 0.0612 all_reduce #44   4.4 2         100% step 40
    rank 1 has waited 4.5 s in all_reduce #44 (float32 [262144], sum, direct) at train.py:5
    -> for rank 2, which is stopped: process 4711 is stopped (SIGSTOP, or a debugger holds it)
    ranks 0, 3 wait, too

Wide terminals show more columns. If there are more ranks than lines, the table has those that
matter: the slowest, stopped or dead ones, and the longest waits; a line sums up the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from phalanx.ops.observe.watch.gather import TROUBLE, ranks_in_words
from phalanx.ops.observe.watch.state import JobState, RankState

WIDE_ENOUGH = 200  # columns if the output is no terminal, and has no width of its own


class _Column(NamedTuple):
    """One column: the least width of a terminal that has it, and its content."""

    title: str
    from_width: int
    cell: Callable[[RankState], str]
    left: bool = False


_STYLES = {"starting": "dim", "ended": "dim"} | dict.fromkeys(TROUBLE, "bold red")


def show(states: Iterator[JobState], console: Console) -> JobState | None:
    """Show states until the last one, in place; return that. It stays on the screen."""
    state: JobState | None = None
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for state in states:
            live.update(picture(state, console.width, console.height), refresh=True)
    return state


def picture(state: JobState, width: int, height: int | None = None) -> RenderableType:
    """Return `state` as a picture of `columns`, and of `lines` if they are given."""
    above = [_headline(state, width)]
    # If there is no limit of lines, nothing is cut off.
    below = [
        Text(
            line,
            style="yellow" if place else "bold red",  # the cause first
            no_wrap=height is not None,
            overflow="ellipsis",
        )
        for place, line in enumerate(state.chain)
    ]
    if state.ended:
        below.append(Text(f"the job has ended: {state.ended}", style="bold"))
    rows = len(state.ranks)
    if height is not None:
        rows = max(1, height - len(above) - len(below) - 3)  # a title, a summary, the cursor's line
    shown, others = _that_matter(state, rows)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), width=width)
    columns = [column for column in _COLUMNS if column.from_width <= width]
    table.add_column("rank", justify="right", no_wrap=True)
    for column in columns:
        last = column is columns[-1]
        table.add_column(
            column.title,
            justify="left" if column.left else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if last else None,
        )
    for rank in shown:
        mark = "> " if rank.rank == state.slowest else ""
        style = _STYLES.get(rank.status, "yellow" if mark else "")
        cells = [Text(column.cell(rank)) for column in columns]
        table.add_row(Text(f"{mark}{rank.rank}"), *cells, style=style)
    summary = [Text(_summary(others), style="dim", no_wrap=True, overflow="ellipsis")]
    return Group(*above, table, *(summary if others else []), *below)


def _headline(state: JobState, width: int) -> Text:
    started = f", started again {state.generation} times" if state.generation else ""
    slowest = "" if state.slowest is None else f"; slowest: rank {state.slowest}"
    world = f"{state.world_size} rank{'s' if state.world_size > 1 else ''}"
    rest = f": {world}{started}{slowest}{_values(state.ranks)}"
    name = Text(state.name)
    name.truncate(max(width - len(rest), 12), overflow="ellipsis")
    return Text(name.plain + rest, style="bold", no_wrap=True, overflow="ellipsis")


def _values(ranks: Sequence[RankState]) -> str:
    """Return the ranks' logged values: that of the first one, and the range of all."""
    told = ""
    names = dict.fromkeys(name for state in ranks for name in state.values)
    for name in names:
        values = [state.values[name] for state in ranks if name in state.values]
        told += f"; {name} {_number(values[0])}"
        numbers = [value for value in values if isinstance(value, float)]
        if len(numbers) > 1 and min(numbers) != max(numbers):
            told += f" ({_number(min(numbers))} to {_number(max(numbers))})"
    return told


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _that_matter(state: JobState, rows: int) -> tuple[list[RankState], list[RankState]]:
    """Return the ranks to show, in their order, and the others."""

    def weight(rank: RankState) -> tuple[bool, bool, float]:
        odd = rank.status in TROUBLE
        return rank.rank != state.slowest, not odd, -rank.seconds_in if rank.waits_for else 0.0

    ordered = sorted(state.ranks, key=weight)
    return sorted(ordered[:rows], key=lambda rank: rank.rank), ordered[rows:]


def _summary(others: Sequence[RankState]) -> str:
    """Return one line about ranks that are not shown."""
    steps = [state.step for state in others if state.step is not None]
    waiting = [state.waiting for state in others if state.status == "running"]
    told = f"and {len(others)} more"
    if steps:
        told += f", at step {min(steps)}" + (f" to {max(steps)}" if min(steps) < max(steps) else "")
    if waiting:
        told += f", waiting {min(waiting):.0%} to {max(waiting):.0%} of the time"
    return f"{told}: {ranks_in_words(sorted(state.rank for state in others))}"


# ------------------------------------------------------------------------------
# Cells.


def _call(state: RankState) -> str:
    if state.status != "running":
        return state.status
    if not state.operation:
        return "computes"
    return state.operation if state.sequence is None else f"{state.operation} #{state.sequence}"


def _share(state: RankState, share: float) -> str:
    return f"{share:.0%}" if state.status == "running" else ""


def _few(ranks: Sequence[int]) -> str:
    """Return the first ranks, and how many more."""
    shown = ",".join(map(str, ranks[:3]))
    return shown if len(ranks) <= 3 else f"{shown} +{len(ranks) - 3}"


def _bytes(count: float) -> str:
    """Return a count of bytes in three digits: `12.3M`; nothing for none."""
    if not count:
        return ""
    for unit in "BKMG":
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1024
    return f"{count:.3g}T"


_COLUMNS = (
    _Column("host", 160, lambda s: s.host, left=True),
    _Column("process", 160, lambda s: str(s.pid or "")),
    _Column("gen", 160, lambda s: str(s.generation)),
    _Column("step", 0, lambda s: "" if s.step is None else str(s.step)),
    _Column("s/step", 0, lambda s: f"{s.step_seconds:.3g}" if s.step_seconds else ""),
    _Column("call", 0, _call, left=True),
    _Column("for s", 0, lambda s: f"{s.seconds_in:.1f}" if s.operation else ""),
    _Column("waits for", 0, lambda s: _few(s.waits_for), left=True),
    _Column("wait", 0, lambda s: _share(s, s.waiting)),
    _Column("comm", 100, lambda s: _share(s, s.communicating)),
    _Column("out/s", 100, lambda s: _bytes(s.sent) if s.status == "running" else ""),
    _Column("in/s", 100, lambda s: _bytes(s.received) if s.status == "running" else ""),
    _Column("memory", 120, lambda s: _bytes(s.memory)),
    _Column("last line", 0, lambda s: s.reason or s.log, left=True),
)
