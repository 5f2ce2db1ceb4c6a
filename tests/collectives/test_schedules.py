"""Every schedule does what its collective promises: proved on symbols, see schedule_checker."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from functools import partial

import pytest
from forms import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checker import assert_rounds_leave_memory_in_peace, join, run
from schedule_proof import ROWS, SIZES, assert_goal, every_rooted_row, every_row, prove, start

from phalanx.collectives.schedules import (
    COLLECTIVES,
    ROOTED,
    Combine,
    Recv,
    Schedule,
    Send,
    schedule,
)
from phalanx.collectives.schedules.steps import turned
from phalanx.errors import InvalidRankError, InvalidWorldSizeError


def test_every_collective_has_its_algorithms() -> None:
    every = ["ring", "direct", "tree", "halving_doubling", "star", "two_level"]
    assert {collective: list(rows) for collective, rows in COLLECTIVES.items()} == {
        "all_reduce": every,
        "reduce_scatter": every,
        "all_gather": every,
        "broadcast": every,
        "reduce": every,
        "gather": ["tree", "star"],
        "scatter": ["tree", "star"],
        "all_to_all": ["direct", "pairwise"],
    }


@every_row
def test_every_contribution_arrives_exactly_once(collective: str, algorithm: str) -> None:
    for size in SIZES:
        prove(collective, algorithm, size)


@every_rooted_row
def test_every_rank_can_be_the_root(collective: str, algorithm: str) -> None:
    for size in (*range(1, 10), 13, 16):
        for root in range(size):
            report = prove(collective, algorithm, size, root=root)
            assert not report.stray


# The ring's all-reduce, and direct, are millions of messages: each is proved at this size once,
# and that in the long form.
THOUSANDS = [
    ("all_reduce", "ring", sizes(201, 1000)),
    ("broadcast", "ring", sizes(201, 301)),
    ("reduce_scatter", "direct", sizes(301, 1000)),
    ("all_gather", "direct", sizes(301, 501)),
    ("broadcast", "direct", 301),
    ("all_reduce", "tree", 1000),
    ("reduce_scatter", "tree", sizes(301, 999)),
    ("all_gather", "tree", 1024),
    ("broadcast", "tree", 1000),
    ("all_reduce", "halving_doubling", sizes(301, 1000)),
    ("all_reduce", "halving_doubling", sizes(512, 1024)),
    ("reduce_scatter", "halving_doubling", sizes(501, 999)),
    ("all_gather", "halving_doubling", 1000),
    ("broadcast", "halving_doubling", 999),
    ("all_reduce", "star", 1000),
    ("reduce_scatter", "star", sizes(301, 999)),
    ("all_gather", "star", 1000),
    ("broadcast", "star", 1000),
    ("reduce", "ring", sizes(201, 301)),
    ("reduce", "direct", sizes(201, 301)),
    ("reduce", "tree", 1000),
    ("reduce", "halving_doubling", 301),
    ("reduce", "star", 1000),
    ("gather", "tree", 999),
    ("gather", "star", 1000),
    ("scatter", "tree", 999),
    ("scatter", "star", 1000),
    ("all_to_all", "direct", 65),
    ("all_to_all", "pairwise", 65),
]


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()  # millions of tuples and no cycles: looking for them takes longer than the proof
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(("collective", "algorithm", "size"), THOUSANDS)
def test_up_to_a_thousand_ranks(collective: str, algorithm: str, size: int) -> None:
    prove(collective, algorithm, size, root=size // 3 if collective in ROOTED else 0)


@settings(deadline=None)  # a busy machine is no bug
@given(st.sampled_from(ROWS), st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_run_makes_no_difference(
    row: tuple[str, str], size: int, chance: random.Random
) -> None:
    assert prove(*row, size, chance=chance) == prove(*row, size)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
def test_what_folds_at_once_folds_all_contributions_in_rank_order(collective: str) -> None:
    for algorithm, row in COLLECTIVES[collective].items():
        assert row.at_once(9) == (algorithm in ("direct", "star"))
        for size in SIZES:

            def in_rank_order(values: list[int], size: int = size) -> int:
                assert values == [1 << rank for rank in range(size)]
                return join(values)

            if row.at_once(size):
                for root in range(size if collective in ROOTED else 1):
                    whole = partial(schedule, collective, algorithm, root=root)
                    run(whole, start(collective, size, row.chunks(size)), fold=in_rank_order)


def test_a_run_of_chunks_that_closes_the_circle_becomes_two_messages() -> None:
    def one(rank: int, size: int) -> Schedule:
        """What the docstring of `turned` shows."""
        yield (Send(2, 2, 2), Send(2, 0, 2)) if rank == 0 else ()

    assert list(turned(one, 3)(3, 4)) == [(Send(1, 1, 2), Send(1, 3, 1), Send(1, 0, 1))]
    assert list(turned(one, 0)(0, 4)) == [(Send(2, 2, 2), Send(2, 0, 2))]


# ------------------------------------------------------------------------------------- two phases


@every_row
def test_every_chunk_has_one_owner_between_the_phases(collective: str, algorithm: str) -> None:
    row = COLLECTIVES[collective][algorithm]
    for size in SIZES:
        owned = [chunk for rank in range(size) for chunk in row.owned(rank, size)]
        assert sorted(owned) == list(range(row.chunks(size)))


@every_row
def test_a_mean_that_owners_divide_is_divided_once_everywhere(
    collective: str, algorithm: str
) -> None:
    row = COLLECTIVES[collective][algorithm]
    for size in SIZES:
        state = start(collective, size, row.chunks(size))
        complete = run(row.reduce, state).state if row.reduce else state
        divided = 1 << size  # one more bit
        for rank in range(size):
            for chunk in row.owned(rank, size):
                if row.reduce:
                    assert complete[rank][chunk] == divided - 1
                complete[rank][chunk] |= divided
        final = run(row.spread, complete).state if row.spread else complete
        assert_goal(collective, final, mark=divided)


@every_row
def test_the_first_phase_only_combines_and_the_second_only_copies(
    collective: str, algorithm: str
) -> None:
    row = COLLECTIVES[collective][algorithm]
    for phase, forbidden in ((row.reduce, Recv), (row.spread, Combine)):
        if phase is not None:
            for size in SIZES:
                for rank in range(size):
                    for steps in phase(rank, size):
                        assert not [step for step in steps if type(step) is forbidden]


# --------------------------------------------------------- what schedules promise their executors


@every_row
def test_what_is_sent_in_round_k_is_received_in_round_k(collective: str, algorithm: str) -> None:
    for size in SIZES:
        report = prove(collective, algorithm, size)
        assert not report.stray
        assert len(set(report.rounds)) == 1, "ranks have equally many rounds"


@every_row
def test_no_round_uses_the_same_memory_twice(collective: str, algorithm: str) -> None:
    for size in SIZES:
        assert_rounds_leave_memory_in_peace(COLLECTIVES[collective][algorithm].schedule, size)


@every_row
def test_one_rank_has_nothing_to_do(collective: str, algorithm: str) -> None:
    assert list(schedule(collective, algorithm, 0, 1)) == []


# ----------------------------------------------------------------------------------- wrong requests


def test_names_that_do_not_exist_are_answered_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="no algorithm 'rign': it is one of ring, direct, tree"):
        schedule("all_reduce", "rign", 0, 2)
    with pytest.raises(ValueError, match="no collective 'allreduce': it is one of all_reduce"):
        schedule("allreduce", "ring", 0, 2)


def test_ranks_and_roots_that_do_not_exist_are_found_before_anything_is_sent() -> None:
    with pytest.raises(InvalidWorldSizeError, match="a world has 1 rank or more, not 0"):
        schedule("all_reduce", "ring", 0, 0)
    with pytest.raises(InvalidRankError, match=r"rank 2 is not one of the 2 ranks 0\.\.1"):
        schedule("all_reduce", "ring", 2, 2)
    with pytest.raises(InvalidRankError, match=r"root 2 is not one of the 2 ranks 0\.\.1"):
        schedule("gather", "tree", 0, 2, root=2)
    with pytest.raises(InvalidRankError, match=r"root -1 is not one of the 2 ranks 0\.\.1"):
        schedule("broadcast", "ring", 0, 2, root=-1)
    with pytest.raises(InvalidRankError, match="all_reduce has no root"):
        schedule("all_reduce", "ring", 0, 2, root=1)
