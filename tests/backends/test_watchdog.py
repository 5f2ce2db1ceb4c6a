"""The chain of waits: who is at its end, drawn and for any graph."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import SimulatedBackend
from phalanx.core.watchdog import LONGEST_QUERY, chain_of_waits, query_lead_time
from phalanx.wire.control import Answer

Answers = dict[int, Answer | None]


def waits(**graph: list[int] | None) -> Answers:
    """`waits(r1=[2], r2=None)`: rank 1 waits for rank 2, which says nothing."""
    return {
        int(name[1:]): None if peers is None else Answer(peers, "an operation")
        for name, peers in graph.items()
    }


# What rank 0 waits for, what the others have answered, and the chain that is expected.
CHAINS: dict[str, tuple[list[int], Answers, tuple[list[int], bool]]] = {
    "0 -> 1": ([1], waits(r1=None), ([1], True)),
    "0 -> 1, which has not been asked": ([1], {}, ([1], True)),
    "0 -> 1, which waits for nobody": ([1], waits(r1=[]), ([1], True)),
    "0 -> 1 -> 2": ([1], waits(r1=[2], r2=None), ([1, 2], True)),
    "0 -> 1 -> 2 -> 3 -> 4": ([1], waits(r1=[2], r2=[3], r3=[4], r4=[]), ([1, 2, 3, 4], True)),
    "0 -> 1 -> 2 and 0 -> 3: the shortest": (
        [1, 3],
        waits(r1=[2], r2=None, r3=None),
        ([3], True),
    ),
    "0 -> 1 -> 2 and 0 -> 2: the shortest": ([1, 2], waits(r1=[2], r2=None), ([2], True)),
    "0 -> 1 <-> 2, and 1 -> 3": ([1], waits(r1=[2, 3], r2=[1], r3=None), ([1, 3], True)),
    "0 -> 1 -> 0: a circle": ([1], waits(r0=[1], r1=[0]), ([1], False)),
    "0 -> 1 -> 2 -> 1: a circle further on": ([1], waits(r1=[2], r2=[1]), ([1], False)),
    "0 -> 0": ([0], waits(r0=[0]), ([0], False)),
    "0 waits for nobody": ([], waits(r1=None), ([], False)),
}


@pytest.mark.parametrize(("first", "answers", "expected"), CHAINS.values(), ids=CHAINS.keys())
def test_the_chain_ends_with_whoever_waits_for_nobody(
    first: list[int], answers: Answers, expected: tuple[list[int], bool]
) -> None:
    assert chain_of_waits(first, answers) == expected


RANK = st.integers(0, 7)
PEERS = st.lists(RANK, max_size=4)
GRAPH = st.dictionaries(RANK, st.none() | PEERS.map(lambda peers: Answer(peers, "an operation")))


def waited_for(rank: int, answers: Answers) -> list[int]:
    answer = answers.get(rank)
    return answer.waits_for if answer is not None else []


@given(PEERS, GRAPH)
def test_in_any_graph_the_chain_is_a_shortest_path_to_an_end_if_there_is_one(
    first: list[int], answers: Answers
) -> None:
    chain, ends = chain_of_waits(first, answers)
    distance = dict.fromkeys(first, 1)  # ranks that can be reached, by the steps that it takes
    for steps in range(1, 9):
        for rank in [rank for rank, far in distance.items() if far == steps]:
            for peer in waited_for(rank, answers):
                distance.setdefault(peer, steps + 1)
    at_ends = [far for rank, far in distance.items() if not waited_for(rank, answers)]

    assert ends == bool(at_ends)
    assert bool(chain) == bool(first)
    for rank, next_rank in pairwise(chain):
        assert next_rank in waited_for(rank, answers)
    assert not chain or chain[0] in first
    assert len(set(chain)) == len(chain)
    if ends:
        assert not waited_for(chain[-1], answers)
        assert len(chain) == min(at_ends)


@given(st.integers(2, 2000))
def test_a_chain_may_be_as_long_as_the_job(size: int) -> None:
    answers: Answers = {rank: Answer([rank + 1], "recv") for rank in range(size - 1)}
    assert chain_of_waits([0], answers) == (list(range(size)), True)


@given(st.floats(1e-3, 1e6))
def test_the_questions_are_asked_before_the_deadline_and_after_most_of_the_time(
    timeout: float,
) -> None:
    assert 0 < query_lead_time(timeout) <= min(timeout / 4, LONGEST_QUERY)


def test_what_was_asked_for_a_work_is_forgotten_when_it_is_over() -> None:
    """Nobody waits for it, so nobody else would."""
    first, second = SimulatedBackend.create_group(2)
    watchdog = first.engine.watchdog
    work = first.irecv(bytearray(1), 1)
    with first.engine.lock:
        watchdog.check_deadline(work, work.deadline - 0.01)
    assert list(watchdog.queries) == [work]
    second.send(b"x", 0)
    assert work.done()
    assert not watchdog.queries
