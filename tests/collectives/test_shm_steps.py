"""Collectives in shared memory, in every order in which ranks may do their steps."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from forms import examples, sizes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shm_model import ROOTED, Call, members, perform

from phalanx import ReduceOp
from phalanx.collectives.shm.plan import SHM_ALGORITHM
from phalanx.transport.shm.control import PARTS, ControlBlock
from phalanx.transport.shm.peer_slot import AHEAD, FLAG

PIECE, SMALL = 1 << 10, 256  # bytes: so that tensors of a few KiB are of several pieces
EVERY = (1 << 8) - 1


@pytest.fixture(autouse=True)
def short_pieces(thresholds: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds(
        small=SMALL,
        piece=PIECE,
        block=PIECE,
        read=PIECE,
        read_least=SMALL,
        reduced_from=PIECE,
        broadcast_from=PIECE,
    )
    crowded = Random(0)
    monkeypatch.setattr(ControlBlock, "is_crowded", lambda control: crowded.random() < 0.5)


def slices_around_thresholds(size: int) -> list[int]:
    """Elements of 4 bytes of a slice, such that slice or whole is near where the way changes."""
    piece = PIECE // size // 64 * 64
    bytes_ = (4, SMALL // size, SMALL, piece, 2 * piece, PIECE, 2 * PIECE)
    around = {b // 4 + more for b in bytes_ for more in (-1, 0, 1)}
    return sorted({*around, 7 * piece // 8} - {0})


MEMORY = {
    "ordinary": (0, 0, 0),
    "registered": (EVERY, EVERY, 0),
    "registered, results are not": (EVERY, 0, 0),
    "results are registered": (0, EVERY, 0),
    "in place": (0, 0, EVERY),
    "in place, registered": (EVERY, EVERY, EVERY),
    "rank 1 has registered": (2, 2, 0),
    "rank 0 has not": (EVERY - 1, EVERY - 1, 0),
    "some of each": (0b10110, 0b01110, 0b00101),
}


@pytest.mark.checkered
@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY.keys())
@pytest.mark.parametrize("reads", [False, True], ids=["staged", "read"])
@pytest.mark.parametrize("size", [2, 5])
def test_every_collective_at_every_threshold(
    size: int, reads: bool, memory: tuple[int, int, int]
) -> None:
    """`reads`: ranks read each other's ordinary memory, which is staged otherwise."""
    registered, results, in_place = memory
    random = Random(size)
    calls = [
        Call(
            collective,
            length,
            random.randrange(size),
            root=random.randrange(size),
            registered=registered,
            results_registered=results,
            in_place=in_place,
            own=random.choice((0, 1, 5)),
        )
        for length in slices_around_thresholds(size)
        for collective in SHM_ALGORITHM
    ]
    random.shuffle(calls)
    with members(size, reads=reads) as everyone:
        perform(everyone, calls, random.choice)


@st.composite
def calls_of(draw: st.DrawFn, size: int) -> Call:
    dtype = draw(st.sampled_from((torch.float32, torch.int64, torch.bfloat16, torch.uint8)))
    lengths = st.one_of(st.integers(1, 40), st.integers(1, 4 * PIECE // dtype.itemsize))
    bits = st.sampled_from((0, EVERY, EVERY - 1, 0b0101, 0b0010))
    return Call(
        draw(st.sampled_from(sorted(SHM_ALGORITHM))),
        draw(lengths),
        draw(st.integers(0, size)),
        dtype,
        draw(st.sampled_from((ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX))),
        draw(st.integers(0, size - 1)),
        *(draw(bits), draw(bits), draw(bits)),
        draw(st.integers(0, 9)),
    )


programs = st.integers(2, 4).flatmap(
    lambda size: st.tuples(st.just(size), st.lists(calls_of(size), min_size=1, max_size=6))
)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(programs, st.lists(st.integers(0, 3), max_size=60), st.integers(0, 2**16), st.booleans())
def test_whoever_is_slow_at_any_point_gets_and_gives_what_is_right(
    program: tuple[int, list[Call]], order: list[int], seed: int, reads: bool
) -> None:
    """Whoever has ended overwrites at once what it gave and got: nobody may read that any more."""
    size, calls = program
    choices, later = iter(order), Random(seed)

    def choose(able: list[int]) -> int:
        number = next(choices, None)
        return later.choice(able) if number is None else able[number % len(able)]

    with members(size, reads=reads) as everyone:
        perform(everyone, calls, choose, seed)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("laggard", [0, 1])
def test_one_that_is_always_last_or_always_first(size: int, laggard: int) -> None:
    """The others go on for as long as they can before the laggard takes a step; and with roles
    changed: it goes on for as long as it can before any of them does."""
    random = Random(laggard)
    calls = [
        Call(collective, length, 1, root=root, registered=bits, results_registered=bits)
        for collective in SHM_ALGORITHM
        for length in (1, 50, 600)
        for root in (0, size - 1)
        for bits in (0, EVERY, 1)
    ]
    random.shuffle(calls)
    for worst in (min, max):
        with members(size) as everyone:
            perform(everyone, calls, lambda able, w=worst: w(able, key=lambda r: r == laggard))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("collective", "length", "farthest"),
    [
        ("broadcast", 1, AHEAD - 1),
        ("scatter", 1, AHEAD - 1),
        ("broadcast", PIECE // 4, PARTS),
        ("broadcast", 7 * PIECE // 4, PARTS),
        ("scatter", 7 * PIECE // 4, PARTS),
    ],
)
def test_a_root_runs_ahead_as_far_as_there_is_memory_for_what_it_gives(
    collective: str, length: int, farthest: int, size: int
) -> None:
    """Those who take come to a collective, and so are one behind, before they have to wait."""
    leads = []

    def choose(able: list[int]) -> int:
        flags = [member.control.words[FLAG] for member in everyone if member.control is not None]
        leads.append(flags[0] - min(flags))
        return min(able)

    with members(size) as everyone:
        perform(everyone, [Call(collective, length)] * 40, choose)
    assert max(leads) == farthest


@pytest.mark.parametrize("collective", ["reduce", "gather"])
def test_who_gives_a_small_tensor_to_a_root_runs_ahead_of_it(collective: str) -> None:
    leads = []

    def choose(able: list[int]) -> int:
        flags = [member.control.words[FLAG] for member in everyone if member.control is not None]
        leads.append(max(flags) - flags[0])
        return max(able)

    with members(3) as everyone:
        perform(everyone, [Call(collective, 1)] * 40, choose)
    assert max(leads) == AHEAD - 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", sizes([0, 1, 2], range(20)))
def test_roots_change_while_some_run_ahead(seed: int, size: int) -> None:
    """Long runs of one rank's steps, among calls that mostly have roots."""
    random = Random(seed)
    calls = [
        Call(
            random.choice((*ROOTED, *ROOTED, "all_reduce", "all_gather")),
            random.choice((1, 50, 600, 2000)),
            root=random.randrange(size),
            registered=random.choice((0, 0, EVERY, 1)),
        )
        for _ in range(80)
    ]
    favourite = 0

    def choose(able: list[int]) -> int:
        nonlocal favourite
        if favourite not in able or random.random() < 0.02:
            favourite = random.choice(able)
        return favourite

    with members(size, reads=seed % 2 == 1) as everyone:
        perform(everyone, calls, choose, seed)
