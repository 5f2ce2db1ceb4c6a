"""Runs the schedules of all ranks against each other, on nothing, and proves what they promise.

A rank takes its next action when what it needs has been given; which of the ranks that could go on
does so next is the caller's choice (`chance`), and must make no difference. Receives block, sends
do not. An action that cannot be, such as a backward pass before its forward pass, is an error at
once; a deadlock is one that says who waits for what.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from phalanx.pipeline.schedules import Action, Kind, Schedule


class BrokenScheduleError(AssertionError):
    """What is wrong with the schedule, and where."""


@dataclass
class Report:
    """What was done: by stage and micro-batch, how often; and the most that lived on each rank."""

    forward: Counter[tuple[int, int]] = field(default_factory=Counter)
    backward: Counter[tuple[int, int]] = field(default_factory=Counter)
    most_alive: list[int] = field(default_factory=list)


def check(schedules: list[Schedule], num_chunks: int, chance: random.Random) -> Report:
    """Run schedules, one for each rank, to their end. Raises BrokenScheduleError."""
    p, last = len(schedules), len(schedules) * num_chunks - 1
    report = Report(most_alive=[0] * p)
    alive: list[set[tuple[int, int]]] = [set() for _ in range(p)]
    next_action: list[Action | None] = [next(schedule, None) for schedule in schedules]

    def needs(rank: int, action: Action) -> bool:
        kind, j, c = action
        stage = c * p + rank
        if kind is Kind.F:
            return stage == 0 or (stage - 1, j) in report.forward
        if (stage, j) not in report.forward:
            raise BrokenScheduleError(f"rank {rank}: {action} before its forward pass")
        return stage == last or (stage + 1, j) in report.backward

    while any(next_action):
        able = [r for r, action in enumerate(next_action) if action and needs(r, action)]
        if not able:
            waits = "; ".join(f"rank {r} waits in {a}" for r, a in enumerate(next_action) if a)
            raise BrokenScheduleError(f"deadlock: {waits}")
        rank = chance.choice(able)
        action = next_action[rank]
        assert action is not None
        done, stage = (report.forward, report.backward)[action.kind], action.chunk * p + rank
        done[stage, action.micro_batch] += 1
        (alive[rank].add, alive[rank].discard)[action.kind]((stage, action.micro_batch))
        report.most_alive[rank] = max(report.most_alive[rank], len(alive[rank]))
        next_action[rank] = next(schedules[rank], None)
    return report
