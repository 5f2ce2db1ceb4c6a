"""What each collective starts from and must end with, and the proof that a schedule does it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from schedule_checker import Report, State, run

from phalanx.collectives.schedules import COLLECTIVES, Schedule, schedule

ROWS = [(collective, algorithm) for collective, rows in COLLECTIVES.items() for algorithm in rows]
SIZES = range(1, 18)

every_row = pytest.mark.parametrize(("collective", "algorithm"), ROWS)


def start(collective: str, size: int, chunks: int, root: int = 0) -> State:
    """What every rank holds before the collective: its own contribution, or nothing."""
    holds: dict[str, Callable[[int, int], bool]] = {
        "all_reduce": lambda rank, chunk: True,
        "reduce_scatter": lambda rank, chunk: True,
        "all_gather": lambda rank, chunk: chunk == rank,
        "broadcast": lambda rank, chunk: rank == root,
    }
    holds_it = holds[collective]
    return [[holds_it(rank, c) << rank for c in range(chunks)] for rank in range(size)]


def assert_goal(collective: str, state: State, root: int = 0, mark: int = 0) -> None:
    """Every contribution is where it belongs, once; `mark` is what else each chunk must bear."""
    size, chunks = len(state), len(state[0])
    everybody = (1 << size) - 1
    goal: dict[str, list[int]] = {
        "all_reduce": [everybody | mark] * chunks,
        "reduce_scatter": [everybody | mark] * chunks,
        "all_gather": [1 << c | mark for c in range(chunks)],
        "broadcast": [1 << root | mark] * chunks,
    }
    for rank, values in enumerate(state):
        if collective == "reduce_scatter":
            assert values[rank] == goal[collective][rank], f"rank {rank}"
        else:
            assert values == goal[collective], f"rank {rank}"


def prove(
    collective: str,
    algorithm: str,
    size: int,
    *,
    root: int = 0,
    chance: random.Random | None = None,
) -> Report:
    def whole(rank: int, size: int) -> Schedule:
        return schedule(collective, algorithm, rank, size, root)

    chunks = COLLECTIVES[collective][algorithm].chunks(size)
    report = run(whole, start(collective, size, chunks, root), chance=chance)
    assert_goal(collective, report.state, root)
    return report
