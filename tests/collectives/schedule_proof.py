"""What each collective starts from and must end with, and the proof that a schedule does it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from schedule_checker import Report, State, run

from phalanx.collectives.schedules import COLLECTIVES, ROOTED, Hosts, Schedule, row_for, schedule

ROWS = [(collective, algorithm) for collective, rows in COLLECTIVES.items() for algorithm in rows]
SIZES = range(1, 18)

every_row = pytest.mark.parametrize(("collective", "algorithm"), ROWS)
every_rooted_row = pytest.mark.parametrize(
    ("collective", "algorithm"), [row for row in ROWS if row[0] in ROOTED]
)


def start(collective: str, size: int, chunks: int, root: int = 0) -> State:
    """What every rank holds before the collective: its own contribution, or nothing."""
    holds: dict[str, Callable[[int, int], bool]] = {
        "all_reduce": lambda rank, chunk: True,
        "reduce_scatter": lambda rank, chunk: True,
        "all_gather": lambda rank, chunk: chunk == rank,
        "broadcast": lambda rank, chunk: rank == root,
        "reduce": lambda rank, chunk: True,
        "gather": lambda rank, chunk: chunk == rank,
        "scatter": lambda rank, chunk: rank == root,
        "all_to_all": lambda rank, chunk: chunk // size == rank,
    }
    holds_it = holds[collective]
    return [[holds_it(rank, c) << rank for c in range(chunks)] for rank in range(size)]


def assert_goal(collective: str, state: State, root: int = 0, mark: int = 0) -> None:
    """Every contribution is where it belongs, once; `mark` is what else each chunk must bear."""
    size, chunks = len(state), len(state[0])
    everybody = (1 << size) - 1
    anything = [None] * chunks

    def only(chunk: int, value: int) -> list[int | None]:
        return [*anything[:chunk], value, *anything[chunk + 1 :]]

    goal: dict[str, Callable[[int], list[int | None]]] = {
        "all_reduce": lambda rank: [everybody] * chunks,
        "reduce_scatter": lambda rank: only(rank, everybody),
        "all_gather": lambda rank: [1 << c for c in range(chunks)],
        "broadcast": lambda rank: [1 << root] * chunks,
        "reduce": lambda rank: [everybody] * chunks if rank == root else anything,
        "gather": lambda rank: [1 << c for c in range(chunks)] if rank == root else anything,
        "scatter": lambda rank: only(rank, 1 << root),
        "all_to_all": lambda rank: [
            1 << c // size if c % size == rank else None for c in range(chunks)
        ],
    }
    for rank, values in enumerate(state):
        due = [None if value is None else value | mark for value in goal[collective](rank)]
        met = [None if wanted is None else value for wanted, value in zip(due, values, strict=True)]
        assert met == due, f"rank {rank}"


def prove(
    collective: str,
    algorithm: str,
    size: int,
    *,
    root: int = 0,
    hosts: Hosts | None = None,
    chance: random.Random | None = None,
) -> Report:
    def whole(rank: int, size: int) -> Schedule:
        return schedule(collective, algorithm, rank, size, root, hosts)

    chunks = row_for(collective, algorithm, hosts, root).chunks(size)
    report = run(whole, start(collective, size, chunks, root), chance=chance)
    assert_goal(collective, report.state, root)
    return report
