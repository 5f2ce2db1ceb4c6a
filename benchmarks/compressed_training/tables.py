"""Summaries as a table, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from compressed_training.summary import Spread, Summary

HEADINGS = (
    "",
    "held-out loss",
    "lowest-highest",
    "of dense",
    "lowest-highest",
    "bytes a step",
    "fewer",
    "ms a step",
)


def cells(one: Summary, steps: int) -> list[str]:
    """A row of the table."""
    return [
        one.row,
        f"{one.loss.median:.3f}",
        _between(one.loss, ".3f"),
        "" if one.above is None else f"{one.above.median:+.1%}",
        "" if one.above is None else _between(one.above, "+.1%"),
        f"{one.nbytes / steps:,.0f}",
        "" if one.fewer is None else f"{one.fewer:.3g}x",
        f"{one.seconds * 1e3:,.0f}",
    ]


def table_of(summaries: Sequence[Summary], *, title: str, steps: int) -> Table:
    """For the terminal."""
    table = Table(title=title)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for one in summaries:
        table.add_row(*cells(one, steps))
    return table


def markdown_of(summaries: Sequence[Summary], steps: int) -> str:
    """For a document: without the time, which is the machine's."""
    columns = len(HEADINGS) - 1
    lines = [list(HEADINGS[:columns]), ["---", *["---:"] * (columns - 1)]]
    lines += [cells(one, steps)[:columns] for one in summaries]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _between(spread: Spread, form: str) -> str:
    """From the lowest to the highest; nothing where they are the same."""
    low, _, high = spread
    return "" if low == high else f"{low:{form}} to {high:{form}}"
