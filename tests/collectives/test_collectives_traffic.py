"""What collectives cost: the bytes that the papers say, no more, and nothing for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx import Backend, ReduceOp, simulate
from phalanx.collectives.cost import choose
from phalanx.collectives.plan import Key, Plan, make_plan
from phalanx.collectives.schedules import COLLECTIVES, REDUCING, ROOTED
from phalanx.core.posted import PostedSend
from phalanx.core.steps import Round
from phalanx.wire.codec import encode

F32 = torch.float32
SLICED = ("gather", "scatter", "all_to_all")  # these cut into equal slices
ROWS = [(collective, name) for collective, rows in COLLECTIVES.items() for name in rows]


def plans(collective: str, algorithm: str, count: int, size: int, root: int = 0) -> list[Plan]:
    """Each rank's plan for `count` elements of float32."""
    op = ReduceOp.SUM if collective in REDUCING else None
    key = Key(collective, algorithm, (count,), F32, op, root)
    return [make_plan(key, rank, size) for rank in range(size)]


def messages(plan: Plan) -> tuple[int, int]:
    """How many messages a rank sends and receives."""
    rounds = [step for step in plan.program if isinstance(step, Round)]
    return sum(len(r.sends) for r in rounds), sum(len(r.receives) for r in rounds)


def payload_of(plan: Plan) -> int:
    """The payload that a rank sends."""
    rounds = [step for step in plan.program if isinstance(step, Round)]
    return sum(send.stop - send.start for r in rounds for send in r.sends)


def sent(collective: str, algorithm: str, count: int, size: int) -> list[int]:
    return [payload_of(plan) for plan in plans(collective, algorithm, count, size)]


@pytest.mark.parametrize("p", range(1, 10))
def test_a_ring_sends_the_least_that_is_possible_from_every_rank(p: int) -> None:
    n = 4 * 12 * p
    assert sent("all_reduce", "ring", 12 * p, p) == [2 * (p - 1) * n // p] * p
    assert sent("reduce_scatter", "ring", 12 * p, p) == [(p - 1) * n // p] * p
    assert sent("all_gather", "ring", 12 * p, p) == [(p - 1) * n // p] * p


@pytest.mark.parametrize("p", range(2, 10))
@pytest.mark.parametrize("count", [7, 100, 1001])
def test_where_slices_differ_a_ring_sends_a_slice_more_or_less_from_every_rank(
    count: int, p: int
) -> None:
    slice_, share = 4 * -(-count // p), 2 * (p - 1) * 4 * count / p
    for each in sent("all_reduce", "ring", count, p):
        assert abs(each - share) <= slice_


@pytest.mark.parametrize("algorithm", ["tree", "star"])
def test_a_tree_and_a_star_send_more_than_a_ring_from_rank_0(algorithm: str) -> None:
    for p in range(3, 10):
        first, *others = sent("all_reduce", algorithm, 12 * p, p)
        assert first > 2 * (p - 1) * 4 * 12
        assert first >= max(others)


@pytest.mark.parametrize("p", range(1, 10))
def test_direct_sends_as_little_in_one_round_each_way(p: int) -> None:
    n = 4 * 12 * p
    assert sent("all_reduce", "direct", 12 * p, p) == [2 * (p - 1) * n // p] * p
    for plan in plans("all_reduce", "direct", 12 * p, p):
        assert sum(isinstance(step, Round) for step in plan.program) == (2 if p > 1 else 0)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_halving_and_doubling_sends_the_rings_bytes_in_logarithmic_rounds(p: int) -> None:
    n = 4 * 12 * p
    assert sent("all_reduce", "halving_doubling", 12 * p, p) == [2 * (p - 1) * n // p] * p
    for plan in plans("all_reduce", "halving_doubling", 12 * p, p):
        assert sum(isinstance(step, Round) for step in plan.program) == 2 * int(math.log2(p))


@pytest.mark.parametrize("p", range(1, 10))
@pytest.mark.parametrize("algorithm", ["tree", "star"])
def test_a_tree_or_a_star_sends_every_tensor_to_the_root_and_back(p: int, algorithm: str) -> None:
    n = 4 * 12 * p
    assert sum(sent("all_reduce", algorithm, 12 * p, p)) == 2 * (p - 1) * n
    assert sum(sent("broadcast", algorithm, 12 * p, p)) == (p - 1) * n
    busiest = (p - 1).bit_length() if algorithm == "tree" else p - 1
    assert max(sent("broadcast", algorithm, 12 * p, p)) == busiest * n


@pytest.mark.parametrize("p", range(1, 10))
def test_a_reduction_to_a_root_sends_what_its_docstring_says(p: int) -> None:
    n = 4 * 12 * p
    for root in range(p):
        others = [rank for rank in range(p) if rank != root]
        tree = [payload_of(plan) for plan in plans("reduce", "tree", 12 * p, p, root)]
        star = [payload_of(plan) for plan in plans("reduce", "star", 12 * p, p, root)]
        assert tree == star == [n if rank in others else 0 for rank in range(p)]
        for algorithm in ("ring", "direct"):
            sent = [payload_of(plan) for plan in plans("reduce", algorithm, 12 * p, p, root)]
            assert [sent[rank] for rank in others] == [n] * (p - 1)
            assert sent[root] == (p - 1) * n // p


@pytest.mark.parametrize("p", range(1, 10))
@pytest.mark.parametrize("algorithm", ["tree", "star"])
def test_gather_and_scatter_move_p_minus_1_slices_at_the_root(p: int, algorithm: str) -> None:
    n = 4 * 12 * p
    for root in range(p):
        scattered = plans("scatter", algorithm, 12 * p, p, root)
        gathered = plans("gather", algorithm, 12 * p, p, root)
        assert payload_of(scattered[root]) == (p - 1) * n // p
        assert payload_of(gathered[root]) == 0
        assert sum(payload_of(plan) for plan in gathered) == sum(
            payload_of(plan) for plan in scattered
        )
        if algorithm == "star":
            assert sum(payload_of(plan) for plan in gathered) == (p - 1) * n // p


@pytest.mark.parametrize("p", range(1, 10))
@pytest.mark.parametrize("algorithm", ["direct", "pairwise"])
def test_an_all_to_all_sends_every_slice_but_a_ranks_own_once(p: int, algorithm: str) -> None:
    n = 4 * 12 * p
    assert sent("all_to_all", algorithm, 12 * p, p) == [(p - 1) * n // p] * p
    for plan in plans("all_to_all", algorithm, 12 * p, p):
        assert messages(plan) == (p - 1, p - 1)


@pytest.mark.parametrize("algorithm", ["tree", "star"])
def test_ranks_below_the_root_take_no_more_memory_than_passes_through_them(algorithm: str) -> None:
    slice_ = 4 * 12
    for root in range(8):
        for collective in ("gather", "scatter"):
            sizes = [plan.work_size for plan in plans(collective, algorithm, 12 * 8, 8, root)]
            below = sizes[root + 1 :] + sizes[:root]
            subtrees = [1, 2, 1, 4, 1, 2, 1] if algorithm == "tree" else [1] * 7
            assert below == [slice_ * ranks for ranks in subtrees]


def bytes_sent(backend: Backend, call: Callable[[], object]) -> int:
    """The payload of the messages that this rank sends during a call."""
    transport = backend.engine.transport
    sent, send_one = [0], transport.send

    def counted(send: PostedSend) -> None:
        sent[0] += len(send.view)
        send_one(send)

    transport.send = counted  # type: ignore[method-assign]
    try:
        call()
    finally:
        transport.send = send_one  # type: ignore[method-assign]
    return sent[0]


def test_uneven_rows_are_moved_once_after_16_bytes_for_each_other_rank() -> None:
    def run(backend: Backend) -> int:
        sizes = [[2, 3, 4], [3, 0, 6], [4, 6, 0]][backend.rank]  # the same both ways
        rows = torch.ones(sum(sizes), 5, dtype=torch.float64)
        return bytes_sent(backend, lambda: phalanx.all_to_all_uneven(rows, backend, sizes, sizes))

    assert simulate(run, 3) == [2 * 16 + 7 * 40, 2 * 16 + 9 * 40, 2 * 16 + 10 * 40]


def test_objects_cost_their_bytes_and_their_lengths() -> None:
    objects = ["", "x" * 200, "y" * 3000]
    lengths = [len(encode(obj)) for obj in objects]

    def run(backend: Backend) -> tuple[int, int]:
        mine = objects[backend.rank]
        return (
            bytes_sent(backend, lambda: phalanx.all_gather_object(mine, backend)),
            bytes_sent(backend, lambda: phalanx.broadcast_object(mine, backend, 2)),
        )

    gathered, broadcast = zip(*simulate(run, 3), strict=True)
    assert sum(gathered) == 2 * (sum(lengths) + 3 * 8)
    assert sum(broadcast) == 2 * (lengths[2] + 8)


@settings(max_examples=examples(200))
@given(st.sampled_from(ROWS), st.integers(0, 60), st.integers(1, 9), st.data())
def test_everything_that_is_sent_is_received_and_no_message_is_empty(
    row: tuple[str, str], count: int, size: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size - 1)) if row[0] in ROOTED else 0
    if row[0] in SLICED:
        count *= size
    outgoing: dict[tuple[int, int], list[int]] = {}
    incoming: dict[tuple[int, int], list[int]] = {}
    for rank, plan in enumerate(plans(*row, count, size, root)):
        for step in plan.program:
            if not isinstance(step, Round):
                continue
            for send in step.sends:
                outgoing.setdefault((rank, send.peer), []).append(send.stop - send.start)
            for receive in step.receives:
                length = receive.stop - receive.start
                incoming.setdefault((receive.peer, rank), []).append(length)
    assert outgoing == incoming
    assert all(length > 0 for lengths in outgoing.values() for length in lengths)


@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_nothing_and_nobody_cost_no_message(collective: str, algorithm: str) -> None:
    for count, size in ((0, 2), (0, 7), (10, 1), (0, 1)):
        for plan in plans(collective, algorithm, count, size):
            assert plan.program == ()
            assert payload_of(plan) == 0
            assert messages(plan) == (0, 0)


def test_one_rank_waits_for_nobody_and_gets_its_value_back() -> None:
    def run(backend: Backend) -> None:
        for op in ReduceOp:
            value = torch.tensor([3, -7, 0])
            result = phalanx.all_reduce(value, backend, op)
            assert result.tolist() == [3, -7, 0]
            assert result.data_ptr() != value.data_ptr()
            assert phalanx.async_reduce_scatter(value, backend, op).done()
        assert phalanx.async_barrier(backend).done()

    simulate(run, 1)


def test_collectives_of_nothing_are_done_at_once_even_if_nobody_else_comes() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            assert phalanx.async_all_reduce(torch.empty(0), backend).done()
            assert phalanx.all_gather(torch.empty(0, 5), backend).shape == (0, 5)

    simulate(run, 3)


@settings(max_examples=examples(60))
@given(st.sampled_from(list(COLLECTIVES)), st.integers(0, 1 << 28), st.integers(1, 9))
def test_auto_picks_the_same_on_every_rank_and_says_why(
    collective: str, count: int, size: int
) -> None:
    choices = simulate(lambda backend: choose(collective, count, backend), size)
    assert len({choice.algorithm for choice in choices}) == 1
    first = choices[0]
    assert first.algorithm in COLLECTIVES[collective]
    assert str(first).startswith(f"{first.algorithm}: ")
    assert set(first.estimates) == set(COLLECTIVES[collective])
    assert first.estimates[first.algorithm] == min(first.estimates.values())


def test_auto_prefers_few_rounds_for_few_bytes_and_few_bytes_for_many() -> None:
    small, large = simulate(
        lambda b: (choose("all_reduce", 8, b).algorithm, choose("all_reduce", 1 << 28, b)), 8
    )[0]
    assert small in ("star", "tree", "direct", "halving_doubling")
    assert large.algorithm in ("ring", "direct", "halving_doubling")
    assert large.estimates["tree"] > large.estimates[large.algorithm]


def test_a_plan_is_made_once_for_calls_of_a_kind() -> None:
    def run(backend: Backend) -> int:
        phalanx.all_reduce(torch.ones(5), backend)
        before = len(backend.cache)
        for _ in range(10):
            phalanx.all_reduce(torch.ones(5), backend)
            phalanx.async_all_reduce_(torch.ones(5), backend).wait()
        return len(backend.cache) - before

    assert simulate(run, 3) == [0, 0, 0]


def test_what_is_remembered_of_earlier_calls_is_bounded() -> None:
    def run(backend: Backend) -> list[int]:
        kept = []
        for count in range(5000):
            phalanx.broadcast(torch.empty(count), backend)
            kept.append(len(backend.cache))
        return kept

    (kept,) = simulate(run, 1)
    assert max(kept[:2500]) == max(kept)
