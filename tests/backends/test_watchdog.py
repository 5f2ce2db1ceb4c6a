"""The chain of waits: who is at its end, drawn and for any graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import MisuseError, SimulatedBackend
from phalanx.core.posted import Wait
from phalanx.core.watchdog import LONGEST_QUERY, query_lead_time, warn_after
from phalanx.wire.control import Answer, chain_of_waits

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


# PHALANX_WARN_AFTER ----------------------------------------------------------------------------


def waiting_until(
    backends: Sequence[SimulatedBackend], *times: float, then: Callable[[], object]
) -> None:
    """The first rank's next wait looks at these times of a clock of its own, and `then` ends it."""
    engine = backends[0].engine
    began = engine.now()

    def wait(until: Wait) -> None:
        with engine.lock:
            for time in times:
                engine.now = lambda time=time: began + time  # type: ignore[misc]
                until.attend()
            engine.now = lambda: began
        then()
        assert until.over

    engine.now = lambda: began
    engine.transport.wait = wait  # type: ignore[method-assign]


def test_a_wait_of_30_s_says_in_the_log_whom_it_waits_for_and_where_that_rank_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, third = backends = SimulatedBackend.create_group(3, timeout=1800)
    third.send(b"x", 1, tag=1)
    second.recv(bytearray(1), 2, tag=1)
    second.irecv(bytearray(1), 2)

    waiting_until(backends, 29.9, then=lambda: second.send(b"x", 0))
    first.recv(bytearray(1), 1)
    assert caplog.messages == []

    waiting_until(backends, 29.9, 30.0, 50.0, then=lambda: second.send(b"x", 0))
    first.recv(bytearray(1), 1)
    (text,) = caplog.messages
    for part in (
        "rank 0: recv #1 at test_watchdog.py:",
        " has waited 30 s for rank 1, which waits in recv #1 at test_watchdog.py:",
        " for rank 2, which has made no matching call (its last is send #0 (tag 1) at test_watch",
        "or is slower than PHALANX_WARN_AFTER allows; it goes on waiting",
    ):
        assert part in text


def test_each_group_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    first, second = backends = SimulatedBackend.create_group(2, timeout=1800)
    group, other = first.subgroup([0, 1]), second.subgroup([0, 1])
    for _ in range(2):
        for mine, peer in ((first, second), (group, other)):
            waiting_until(backends, 30.0, then=lambda peer=peer: peer.send(b"x", 0))
            mine.recv(bytearray(1), 1)
    assert [" in the group of ranks [0, 1]" in text for text in caplog.messages] == [False, True]


def test_no_warning_where_the_deadline_says_it_or_nobody_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = backends = SimulatedBackend.create_group(2, timeout=30)
    waiting_until(backends, 29.99, then=lambda: second.send(b"x", 0))
    first.recv(bytearray(1), 1)
    work = first.irecv(bytearray(1), 1, timeout=1800)
    began = first.engine.now()
    first.engine.now = lambda: began + 100
    assert not work.done()
    assert caplog.messages == []


def test_a_wait_for_any_of_several_warns_too(caplog: pytest.LogCaptureFixture) -> None:
    first, second = backends = SimulatedBackend.create_group(2, timeout=1800)
    work = first.irecv(bytearray(1), 1)
    waiting_until(backends, 30.0, then=lambda: second.send(b"x", 0))
    first.wait_any([work])
    (text,) = caplog.messages
    assert text.startswith("rank 0: wait_any (recv #0 at ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 30), ("", 30), ("2.5", 2.5), ("0", math.inf), ("off", math.inf), ("inf", math.inf)],
)
def test_what_the_variable_says(text: str | None, seconds: float) -> None:
    assert warn_after({} if text is None else {"PHALANX_WARN_AFTER": text}) == seconds


@pytest.mark.parametrize("text", ["-1", "nan", "soon", "1 s"])
def test_what_the_variable_may_not_say(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_WARN_AFTER", text)
    with pytest.raises(MisuseError, match=f"PHALANX_WARN_AFTER='{text}'.*such as 30"):
        SimulatedBackend.create_group(2)
