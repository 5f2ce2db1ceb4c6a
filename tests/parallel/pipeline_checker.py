"""Runs the schedules of all ranks against each other, without tensors, and draws them.

A rank takes its next action when the input of the action is there. Which of the ranks that can
continue does so next is the caller's choice (`chance`), and must make no difference. Receives
block, sends do not. An impossible action, such as a backward pass before its forward pass, is an
error at once; the error of a deadlock says which action each rank waits in.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from math import ceil

from phalanx.pipeline.schedules import SCHEDULES, Action, ActionKind, B, Schedule, ScheduleRow

LOOPED = SCHEDULES["1f1b"]


def group(p: int, m: int) -> int:
    """g: about p micro-batches, m divided by m // p, rounded up."""
    return ceil(m / max(1, m // p))


# i, p, m, v -> the most chunks' activations that are alive on rank i, as schedules.py has it
ALIVE = {
    "gpipe": lambda i, p, m, v: m,
    "1f1b": lambda i, p, m, v: min(m, p - i),
    "interleaved_1f1b": lambda i, p, m, v: min(v * m, (v - 1) * group(p, m) + 2 * (p - i - 1) + 1),
    "zb_h1": lambda i, p, m, v: min(m, p),
    "zb_v": lambda i, p, m, v: min(2 * m, m + 1 + i, 2 * p),
}


def stage_of(row: ScheduleRow, i: int, c: int, p: int) -> int:
    """The stage that is chunk c of rank i."""
    return next(s for s in range(c * p, (c + 1) * p) if row.rank_of(s, p) == i)


class BrokenScheduleError(AssertionError):
    """What is wrong with the schedule, and where."""


@dataclass
class Report:
    """What was done: by stage and micro-batch, how often; and the most that lived on each rank."""

    forward: Counter[tuple[int, int]] = field(default_factory=Counter)
    backward: Counter[tuple[int, int]] = field(default_factory=Counter)
    weights: Counter[tuple[int, int]] = field(default_factory=Counter)
    most_alive: list[int] = field(default_factory=list)


def check(
    schedules: list[Schedule], num_chunks: int, chance: random.Random, row: ScheduleRow = LOOPED
) -> Report:
    """Run schedules, one for each rank, to their end. Raises BrokenScheduleError.

    row    where its stages are, and whether activations live until W
    """
    p, last = len(schedules), len(schedules) * num_chunks - 1
    report = Report(most_alive=[0] * p)
    ends_life = ActionKind.W if row.passes == 3 else ActionKind.B
    alive: list[set[tuple[int, int]]] = [set() for _ in range(p)]
    next_action: list[Action | None] = [next(schedule, None) for schedule in schedules]

    def needs(rank: int, action: Action) -> bool:
        kind, j, c = action
        stage = stage_of(row, rank, c, p)
        if kind is ActionKind.F:
            return stage == 0 or (stage - 1, j) in report.forward
        if (stage, j) not in report.forward:
            raise BrokenScheduleError(f"rank {rank}: {action} before its forward pass")
        if kind is ActionKind.W:
            if (stage, j) not in report.backward:
                raise BrokenScheduleError(f"rank {rank}: {action} before {B(j, c)}")
            return True
        return stage == last or (stage + 1, j) in report.backward

    while any(next_action):
        able = [r for r, action in enumerate(next_action) if action and needs(r, action)]
        if not able:
            waits = "; ".join(f"rank {r} waits in {a}" for r, a in enumerate(next_action) if a)
            raise BrokenScheduleError(f"deadlock: {waits}")
        rank = chance.choice(able)
        action = next_action[rank]
        assert action is not None
        done = (report.forward, report.backward, report.weights)[action.kind]
        passed = stage_of(row, rank, action.chunk, p), action.micro_batch
        done[passed] += 1
        if action.kind is ActionKind.F:
            alive[rank].add(passed)
        elif action.kind is ends_life:
            alive[rank].discard(passed)
        report.most_alive[rank] = max(report.most_alive[rank], len(alive[rank]))
        next_action[rank] = next(schedules[rank], None)
    return report


# A schedule in unit times: when each rank does what, and its picture as in the docstrings.

Slot = tuple[int, int, Action]  # begins, ends, what


def timeline(
    schedule: str,
    p: int,
    m: int,
    v: int = 1,
    *,
    forward: int = 1,
    backward: int = 1,
    weights: int = 1,
) -> list[list[Slot]]:
    """For each rank its actions and when they begin and end, if messages took no time.

    forward, backward, weights   how long F, B and W of one chunk take

    Raises RuntimeError if the schedule cannot go on, naming the action that each rank waits in.
    """
    row = SCHEDULES[schedule]
    todo = [list(row.generator(i, p, m, v))[::-1] for i in range(p)]
    slots: list[list[Slot]] = [[] for _ in range(p)]
    ends: dict[
        tuple[ActionKind, int, int], int
    ] = {}  # of the pass of a micro-batch through a stage
    last = p * v - 1
    waiting = list(range(p))
    while waiting:
        i = waiting.pop()
        while todo[i]:
            kind, j, c = action = todo[i][-1]
            s = stage_of(row, i, c, p)
            if kind is ActionKind.F:
                ready = ends.get((ActionKind.F, s - 1, j)) if s else 0
            elif kind is ActionKind.W:
                ready = ends.get((ActionKind.B, s, j))
            else:
                ready = ends.get((ActionKind.B, s + 1, j) if s < last else (ActionKind.F, s, j))
            if ready is None:
                break
            todo[i].pop()
            begins = max(ready, slots[i][-1][1] if slots[i] else 0)
            ends[kind, s, j] = begins + (forward, backward, weights)[kind]
            slots[i].append((begins, ends[kind, s, j], action))
            waiting += {(i + 1) % p, (i - 1) % p} - {*waiting, i}
    if any(todo):
        stuck = ", ".join(f"rank {i} in {todo[i][-1]}" for i in range(p) if todo[i])
        raise RuntimeError(f"{schedule} with p = {p}, m = {m}, v = {v} cannot go on: {stuck}")
    return slots


def picture(schedule: str, p: int, m: int, v: int = 1) -> str:
    """Draw what the ranks do; a forward pass is as long as a backward pass.

    >>> from pipeline_checker import picture
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
