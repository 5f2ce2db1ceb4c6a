"""Pictures of schedules: the ones in the docstrings of this package, which the tests redraw.

A line is a round, a column a sender, and a cell a message:

    0 -2-> 1       rank 0 sends its chunk 2 to rank 1, where it overwrites chunk 2
    0 +2+> 1       ... where it is reduced into chunk 2
    0 -2:5-> 1     ... chunks 2, 3 and 4, as Python writes ranges
"""

from __future__ import annotations

from .steps import Combine, Round, ScheduleFunction, Send

__all__ = ["picture"]


def picture(schedule: ScheduleFunction, size: int) -> str:
    """Draw what `schedule` does with `size` ranks; it has the same number of rounds on every rank.

    >>> from phalanx.collectives.schedules import picture, tree_reduce
    >>> print(picture(tree_reduce, 4))
    round 0   1 +0+> 0              3 +0+> 2
    round 1              2 +0+> 0
    """
    rounds = list(zip(*(schedule(rank, size) for rank in range(size)), strict=True))
    drawn = [[_messages(rank, ranks) for rank in range(size)] for ranks in rounds]
    columns = [max((len(line[rank]) for line in drawn), default=0) for rank in range(size)]
    width = max((len(cell) for line in drawn for cells in line for cell in cells), default=0)
    lines = []
    for number, line in enumerate(drawn):
        cells = [f"round {number}".ljust(len(f"round {len(drawn) - 1}"))]
        for rank in range(size):
            cells += line[rank] + [""] * (columns[rank] - len(line[rank]))
        lines.append("   ".join([cells[0], *(cell.ljust(width) for cell in cells[1:])]).rstrip())
    return "\n".join(lines)


def _messages(rank: int, ranks: tuple[Round, ...]) -> list[str]:
    """The messages of one rank in one round, of which `ranks` is what every rank does."""
    return [_message(rank, step, ranks[step.peer]) for step in ranks[rank] if type(step) is Send]


def _message(rank: int, send: Send, taken_in: Round) -> str:
    combined = any(
        isinstance(step, Combine) and step == Combine(rank, send.chunk, send.count)
        for step in taken_in
    )
    line = "+" if combined else "-"
    end = send.chunk + send.count
    chunks = f"{send.chunk}" if send.count == 1 else f"{send.chunk}:{end}"
    return f"{rank} {line}{chunks}{line}> {send.peer}"
