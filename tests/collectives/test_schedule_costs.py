"""Rounds and traffic of every schedule are those of the papers. Traffic is counted in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from schedule_checker import run
from schedule_proof import SIZES, every_row, prove, start

from phalanx.collectives.cost import FORMULAS
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.collectives.schedules.halving_doubling import (
    core_chunks,
    doubling_all_gather,
    halving_reduce,
)
from phalanx.collectives.schedules.tree import tree_gather, tree_scatter


def log2(size: int) -> int:
    """Rounded up."""
    return (size - 1).bit_length()


def halvings(size: int) -> int:
    """log2 of the core, and a round in which pairs hand over, where there are any."""
    return size.bit_length() - 1 + odd_size(size)


def odd_size(size: int) -> bool:
    return size & (size - 1) != 0


ROUNDS: dict[str, dict[str, Callable[[int], int]]] = {
    "all_reduce": {
        "ring": lambda p: 2 * (p - 1),
        "direct": lambda p: 2 * (p > 1),
        "tree": lambda p: 2 * log2(p),
        "halving_doubling": lambda p: 2 * halvings(p),
        "star": lambda p: 2 * (p > 1),
        "two_level": lambda p: 2 * (p > 1),  # on one host; see test_two_level.py
    },
    "reduce_scatter": {
        "ring": lambda p: p - 1,
        "direct": lambda p: 1 * (p > 1),
        "tree": lambda p: 2 * log2(p),
        "halving_doubling": lambda p: halvings(p) + odd_size(p),
        "star": lambda p: 2 * (p > 1),
        "two_level": lambda p: 1 * (p > 1),
    },
    "all_gather": {
        "ring": lambda p: p - 1,
        "direct": lambda p: 1 * (p > 1),
        "tree": lambda p: 2 * log2(p),
        "halving_doubling": lambda p: odd_size(p) + halvings(p),
        "star": lambda p: 2 * (p > 1),
        "two_level": lambda p: 1 * (p > 1),
    },
    "broadcast": {
        "ring": lambda p: 2 * (p - 1),
        "direct": lambda p: 2 * (p > 1),
        "tree": log2,
        "halving_doubling": lambda p: log2(p) + odd_size(p) + halvings(p),
        "star": lambda p: 1 * (p > 1),
        "two_level": lambda p: 2 * (p > 1),
    },
    "reduce": {
        "ring": lambda p: p * (p > 1),
        "direct": lambda p: 2 * (p > 1),
        "tree": log2,
        "halving_doubling": lambda p: halvings(p) + odd_size(p) + log2(p),
        "star": lambda p: 1 * (p > 1),
        "two_level": lambda p: 2 * (p > 1),
    },
    "gather": {"tree": log2, "star": lambda p: 1 * (p > 1)},
    "scatter": {"tree": log2, "star": lambda p: 1 * (p > 1)},
    "all_to_all": {"direct": lambda p: 1 * (p > 1), "pairwise": lambda p: p - 1},
}


@every_row
def test_rounds_are_as_many_as_the_papers_say(collective: str, algorithm: str) -> None:
    rounds = ROUNDS[collective][algorithm]
    for size in (*SIZES, 31, 32, 33):
        assert prove(collective, algorithm, size).rounds == [rounds(size)] * size


@every_row
def test_the_costs_by_which_auto_picks_are_those_of_the_schedules(
    collective: str, algorithm: str
) -> None:
    """Rounds exactly; bytes and messages, of which those of the busiest rank count, about."""
    for size in (2, 4, 8, 16):
        report = prove(collective, algorithm, size)
        chunks = len(report.state[0])
        work = FORMULAS[collective][algorithm](size, 1.0)  # for a tensor of one byte
        assert work.rounds == ROUNDS[collective][algorithm](size)
        tensors = chunks / size if collective == "all_to_all" else chunks
        both = max if work.both_ways else sum
        moved = max(both(ways) for ways in zip(report.sent, report.received, strict=True)) / tensors
        assert 0.5 * work.bytes <= moved <= work.bytes * 1.001
        assert max(report.messages) <= 2 * work.messages


def test_every_row_has_its_cost() -> None:
    assert {name: list(rows) for name, rows in FORMULAS.items()} == {
        name: list(rows) for name, rows in COLLECTIVES.items()
    }


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_all_reduce_moves_2_p_minus_1_chunks_through_every_rank(algorithm: str) -> None:
    for p in SIZES:
        report = prove("all_reduce", algorithm, p)
        assert report.sent == report.received == [2 * (p - 1)] * p


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16, 32])
def test_halving_doubling_moves_what_the_ring_does_in_2_log2_p_messages(p: int) -> None:
    report = prove("all_reduce", "halving_doubling", p)
    assert report.sent == report.received == [2 * (p - 1)] * p
    assert report.messages == [2 * log2(p)] * p


def test_halving_doubling_moves_the_tensor_once_each_way_for_the_even_rank_of_a_pair() -> None:
    for p in SIZES:
        report = prove("all_reduce", "halving_doubling", p)
        pairs = p - (1 << p.bit_length() - 1)
        for even in range(0, 2 * pairs, 2):
            assert (report.sent[even], report.received[even]) == (p, p)
            assert report.messages[even] == 1


def test_halving_sends_away_and_doubling_fetches_every_chunk_that_is_not_the_ranks_own() -> None:
    for p in SIZES:
        pairs = p - (1 << p.bit_length() - 1)
        halved = run(halving_reduce, start("all_reduce", p, p))
        doubled = run(doubling_all_gather, halved.state)
        for rank in range(p):
            own = len(core_chunks(rank, p))
            if own:
                assert halved.sent[rank] == doubled.received[rank] == p - own
        assert sum(map(bool, halved.sent)) == p if p > 1 else halved.sent == [0]
        assert sum(doubled.sent) == sum(halved.received)
        assert max(halved.messages) == max(doubled.messages) - (pairs > 0)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_half_an_all_reduce_moves_half_of_that(collective: str, algorithm: str) -> None:
    for p in SIZES:
        report = prove(collective, algorithm, p)
        assert report.sent == report.received == [p - 1] * p


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving_doubling"])
def test_an_all_gather_tells_nobody_what_it_knows(algorithm: str) -> None:
    for p in SIZES:
        assert prove("all_gather", algorithm, p).received == [p - 1] * p


def test_tree_all_reduce_has_two_messages_for_every_rank_but_the_root() -> None:
    for p in SIZES:
        report = prove("all_reduce", "tree", p)
        assert sum(report.messages) == 2 * (p - 1)
        assert report.sent[0] == report.received[0] == log2(p)


def test_tree_scatter_and_gather_move_p_minus_1_chunks_at_the_root_in_log2_p_messages() -> None:
    for p in SIZES:
        scatter = run(tree_scatter, [[1] * p, *([0] * p for _ in range(p - 1))])
        assert [scatter.state[rank][rank] for rank in range(p)] == [1] * p
        assert (scatter.sent[0], scatter.messages[0]) == (p - 1, log2(p))
        gather = run(tree_gather, [[(c == rank) << c for c in range(p)] for rank in range(p)])
        assert gather.state[0] == [1 << c for c in range(p)]
        assert (gather.received, gather.sent) == (scatter.sent, scatter.received)
        assert sum(gather.messages) == sum(scatter.messages) == p - 1


def test_star_moves_everything_through_the_hub() -> None:
    for p in SIZES:
        report = prove("all_reduce", "star", p)
        assert report.sent == report.received == [p - 1] + [1] * (p - 1)


def test_ring_broadcast_passes_the_tensor_on_once_per_rank() -> None:
    for p in SIZES[1:]:
        report = prove("broadcast", "ring", p)
        assert report.sent == [p] * (p - 1) + [0]
        assert report.received == [0] + [p] * (p - 1)


def test_direct_broadcast_sends_the_tensor_about_twice_from_the_root_and_once_from_others() -> None:
    for p in SIZES[1:]:
        report = prove("broadcast", "direct", p)
        assert report.sent == [2 * (p - 1)] + [p - 2] * (p - 1)
        assert report.received == [0] + [p] * (p - 1)


@pytest.mark.parametrize("algorithm", COLLECTIVES["broadcast"])
def test_no_broadcast_tells_the_root_what_it_knows(algorithm: str) -> None:
    for p in SIZES:
        assert prove("broadcast", algorithm, p).received[0] == 0


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_a_reduction_of_something_large_brings_the_root_twice_its_size_at_most(
    algorithm: str,
) -> None:
    for p in SIZES:
        report = prove("reduce", algorithm, p)
        assert report.received[0] == 2 * (p - 1)
        assert report.sent == [p - 1] + [p] * (p - 1)


@pytest.mark.parametrize("p", [2, 4, 8, 16, 32])
def test_halving_and_a_tree_reduce_in_2_log2_p_messages_what_the_ring_does_in_2_p(p: int) -> None:
    report = prove("reduce", "halving_doubling", p)
    assert report.received[0] == 2 * (p - 1)
    assert max(report.messages) == log2(p) + 1


def test_a_tree_reduces_with_one_message_of_each_rank_but_the_root() -> None:
    for p in SIZES:
        assert prove("reduce", "tree", p).messages == [0] + [1] * (p - 1)


@pytest.mark.parametrize("algorithm", COLLECTIVES["gather"])
def test_a_gather_brings_the_root_every_chunk_but_its_own_once(algorithm: str) -> None:
    for p in SIZES:
        for root in range(p):
            report = prove("gather", algorithm, p, root=root)
            assert (report.received[root], report.sent[root]) == (p - 1, 0)


@pytest.mark.parametrize("algorithm", COLLECTIVES["scatter"])
def test_a_scatter_sends_every_chunk_but_its_own_from_the_root_once(algorithm: str) -> None:
    for p in SIZES:
        for root in range(p):
            report = prove("scatter", algorithm, p, root=root)
            assert (report.received[root], report.sent[root]) == (0, p - 1)


def test_a_root_other_than_rank_0_costs_a_tree_one_message_more_on_each_level_at_most() -> None:
    for p in SIZES:
        for root in range(p):
            for collective in ("gather", "scatter"):
                messages = prove(collective, "tree", p, root=root).messages
                assert sum(messages) <= p - 1 + log2(p)


@pytest.mark.parametrize("algorithm", COLLECTIVES["all_to_all"])
def test_an_all_to_all_moves_every_chunk_once_but_a_ranks_own(algorithm: str) -> None:
    for p in SIZES:
        report = prove("all_to_all", algorithm, p)
        assert report.sent == report.received == report.messages == [p - 1] * p


def test_in_a_pairwise_exchange_nobody_hears_from_two_ranks_in_one_round() -> None:
    for p in SIZES:
        for rank in range(p):
            for steps in COLLECTIVES["all_to_all"]["pairwise"].schedule(rank, p):
                assert sorted(type(step).__name__ for step in steps) == ["Recv", "Send"]
