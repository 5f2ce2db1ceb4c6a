"""A schedule in unit times: when each rank does what, and its picture, as drawn in schedules.py."""

from __future__ import annotations

from .actions import Action, Kind
from .schedules import SCHEDULES

__all__ = ["Slot", "picture", "timeline"]

Slot = tuple[int, int, Action]  # begins, ends, what


def timeline(
    schedule: str, p: int, m: int, v: int = 1, *, forward: int = 1, backward: int = 1
) -> list[list[Slot]]:
    """For each rank its actions and when they begin and end, if messages took no time.

    forward, backward   how long a pass through one chunk takes

    Raises RuntimeError if the schedule cannot go on, naming the action that each rank waits in.
    """
    todo = [list(SCHEDULES[schedule].generator(i, p, m, v))[::-1] for i in range(p)]
    slots: list[list[Slot]] = [[] for _ in range(p)]
    ends: dict[tuple[Kind, int, int], int] = {}  # of the pass of a micro-batch through a stage
    last = p * v - 1
    waiting = list(range(p))
    while waiting:
        i = waiting.pop()
        while todo[i]:
            kind, j, c = action = todo[i][-1]
            s = c * p + i
            if kind is Kind.F:
                ready = ends.get((Kind.F, s - 1, j)) if s else 0
            else:
                ready = ends.get((Kind.B, s + 1, j) if s < last else (Kind.F, s, j))
            if ready is None:
                break
            todo[i].pop()
            begins = max(ready, slots[i][-1][1] if slots[i] else 0)
            ends[kind, s, j] = begins + (forward if kind is Kind.F else backward)
            slots[i].append((begins, ends[kind, s, j], action))
            waiting += {(i + 1) % p, (i - 1) % p} - {*waiting, i}
    if any(todo):
        stuck = ", ".join(f"rank {i} in {todo[i][-1]}" for i in range(p) if todo[i])
        raise RuntimeError(f"{schedule} with p = {p}, m = {m}, v = {v} cannot go on: {stuck}")
    return slots


def picture(schedule: str, p: int, m: int, v: int = 1) -> str:
    """Draw what the ranks do; a forward pass is as long as a backward pass.

    >>> from phalanx.parallel.pipeline.timeline import picture
    >>> print(picture("1f1b", 2, 3))
    rank 0   F0 F1 .  B0 F2 B1 .  B2
    rank 1   .  F0 B0 F1 B1 F2 B2 .
    """
    slots = timeline(schedule, p, m, v)
    length = max(own[-1][1] for own in slots)
    rows = [["."] * length for _ in slots]
    for row, own in zip(rows, slots, strict=True):
        for begins, _, action in own:
            row[begins] = str(action)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"rank {i}   " + " ".join(map(str.ljust, row, widths)).rstrip()
        for i, row in enumerate(rows)
    )
