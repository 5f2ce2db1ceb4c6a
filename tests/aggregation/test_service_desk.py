"""The protocol of a server, without a message: every order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import ServerMode
from phalanx.aggregation.parameter_server.state import Action, Apply, Desk, Free, Part, Say
from phalanx.aggregation.parameter_server.wire import Kind, Word

A, B, C = 1, 2, 3


def desk_of(workers, mode=ServerMode.SYNCHRONOUS, quorum=None) -> Desk:
    return Desk(workers, mode, len(workers) if quorum is None else quorum, digest=7)


def tell(desk: Desk, worker: int, kind: Kind, request: int = 1, number: int = 0) -> list[Action]:
    desk.heard(worker, Word(kind, request, number))
    return list(desk.settle())


def join(desk: Desk, worker: int, clock: int | None = None) -> list[Action]:
    (answer,) = tell(desk, worker, Kind.HELLO, number=7)
    assert isinstance(answer, Say)
    assert answer.word.kind is Kind.WELCOME
    return tell(desk, worker, Kind.JOIN, number=answer.word.number if clock is None else clock)


def done(worker: int, request: int, number: int) -> Say:
    return Say(worker, Word(Kind.DONE, request, number))


def values(worker: int, request: int, steps: int) -> Say:
    return Say(worker, Word(Kind.VALUES, request, steps))


def test_a_step_of_all_is_one_step_of_the_mean_and_is_over_when_the_last_has_pushed() -> None:
    desk = desk_of([A, B])
    join(desk, A)
    assert tell(desk, A, Kind.PULL, 2) == [values(A, 2, 0)]
    assert tell(desk, A, Kind.PUSH, 3, 1) == []  # B may come yet
    join_b = join(desk, B)
    assert join_b == [done(A, 3, 1)]
    assert tell(desk, A, Kind.PULL, 4, 1) == []
    assert tell(desk, B, Kind.PUSH, 9, 1) == [
        done(B, 9, 1),
        Apply([A, B]),
        Free(A),
        Free(B),
        values(A, 4, 1),
    ]


def test_a_push_that_comes_again_counts_once() -> None:
    for mode in (ServerMode.ASYNCHRONOUS, ServerMode.staleness(0)):
        desk = desk_of([A], mode)
        join(desk, A)
        assert tell(desk, A, Kind.PUSH, 5, 1) == [Apply([A]), Free(A), done(A, 5, 1)]
        assert tell(desk, A, Kind.PUSH, 6, 1) == [Free(A), done(A, 6, 1)]
        assert tell(desk, A, Kind.SKIP, 7, 1) == [done(A, 7, 1)]
        assert (desk.steps, desk.visits[A].pushes) == (1, 1)


def test_what_two_hold_counts_in_turn_as_soon_as_it_may() -> None:
    desk = desk_of([A, B], ServerMode.staleness(1))
    join(desk, A)
    join(desk, B)
    for number in (1, 2):
        assert done(A, number, number) in tell(desk, A, Kind.PUSH, number, number)
    assert tell(desk, A, Kind.PUSH, 3, 3) == []  # 2 - 0 > 1
    assert tell(desk, A, Kind.PULL, 4, 2) == []
    assert tell(desk, B, Kind.PUSH, 1, 1) == [
        Apply([B]),
        Free(B),
        done(B, 1, 1),
        Apply([A]),
        Free(A),
        done(A, 3, 3),
    ]
    assert tell(desk, B, Kind.BYE, 2) == [done_bye(B, 2), Part(B), values(A, 4, 4)]


def done_bye(worker: int, request: int) -> Say:
    return Say(worker, Word(Kind.DONE, request))


def test_a_step_that_is_skipped_by_all_is_no_step_of_the_optimizer() -> None:
    desk = desk_of([A, B])
    join(desk, A)
    join(desk, B)
    assert tell(desk, A, Kind.SKIP, 2, 1) == [done(A, 2, 1)]
    assert tell(desk, B, Kind.SKIP, 2, 1) == [done(B, 2, 1)]
    assert (desk.steps, desk.round) == (0, 1)
    tell(desk, A, Kind.SKIP, 3, 2)
    assert tell(desk, B, Kind.PUSH, 3, 2) == [done(B, 3, 2), Apply([B]), Free(B)]


def test_who_says_goodbye_is_not_waited_for_and_what_it_has_pushed_counts() -> None:
    desk = desk_of([A, B])
    join(desk, A)
    join(desk, B)
    tell(desk, A, Kind.PUSH, 2, 1)
    assert tell(desk, A, Kind.BYE, 3) == [done_bye(A, 3), Part(A)]
    assert tell(desk, B, Kind.PUSH, 2, 1) == [done(B, 2, 1), Apply([A, B]), Free(A), Free(B)]
    tell(desk, B, Kind.BYE, 3)
    assert not desk.is_open


def test_no_step_of_all_ends_between_a_greeting_and_joining() -> None:
    """Of two servers one was a step ahead when C came: it joins both at the later step."""
    ahead, behind = desk_of([A, C], quorum=1), desk_of([A, C], quorum=1)
    for desk in (ahead, behind):
        join(desk, A)
    tell(ahead, A, Kind.PUSH, 2, 1)
    (one,), (two,) = (tell(desk, C, Kind.HELLO, 1, 7) for desk in (ahead, behind))
    assert (one.word.number, two.word.number) == (1, 0)
    assert tell(behind, A, Kind.PUSH, 2, 1) == [done(A, 2, 1)]
    assert tell(behind, A, Kind.PULL, 3, 1) == []
    assert tell(behind, C, Kind.JOIN, number=1) == [Apply([A]), Free(A), values(A, 3, 1)]
    assert tell(ahead, C, Kind.JOIN, number=1) == []
    for desk in (ahead, behind):
        tell(desk, C, Kind.PUSH, 2, 1)
        assert Apply([A, C]) in tell(desk, A, Kind.PUSH, 4, 2)


def test_the_lost_are_not_waited_for_and_what_they_held_is_dropped() -> None:
    desk = desk_of([A, B, C], ServerMode.staleness(0))
    join(desk, A)
    join(desk, B)
    assert done(A, 2, 1) not in tell(desk, A, Kind.PUSH, 2, 1)  # C may come
    desk.lost(C)
    assert list(desk.settle()) == [Apply([A]), Free(A), done(A, 2, 1)]
    assert tell(desk, A, Kind.PUSH, 3, 2) == []
    desk.lost(A)
    assert list(desk.settle()) == []
    assert tell(desk, B, Kind.PUSH, 2, 1) == [Apply([B]), Free(B), done(B, 2, 1)]
    assert desk.visits[A].pushes == 1


@pytest.mark.parametrize("kind", [Kind.JOIN, Kind.PULL, Kind.PUSH, Kind.SKIP, Kind.BYE, Kind.DONE])
def test_what_nobody_says_before_hello_is_an_error(kind: Kind) -> None:
    with pytest.raises(ValueError, match=f"it says {kind.name} when it is COMING"):
        tell(desk_of([A]), A, kind)


class Script:
    """A worker that pushes and pulls in any rhythm, repeats what it may have sent, and leaves."""

    def __init__(self, worker: int, draw: random.Random) -> None:
        self.worker, self.draw = worker, draw
        self.request = self.number = self.done = 0
        self.stage = "away"

    def next_word(self) -> Word | None:
        self.request += 1
        if self.stage == "away":
            self.stage = "greeting"
            return Word(Kind.HELLO, self.request, 7)
        if self.stage == "there":
            choice = self.draw.random()
            if choice < 0.02:
                self.stage = "gone"
                return Word(Kind.BYE, self.request)
            if choice < 0.4:
                return Word(Kind.PULL, self.request, self.done)
            return Word(Kind.SKIP if choice < 0.45 else Kind.PUSH, self.request, self.done + 1)
        return None


@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(0, 3), st.sampled_from("asx"))
def test_nobody_is_ever_further_ahead_and_every_push_counts_once(
    seed: int, workers: int, bound: int, kind: str
) -> None:
    mode = {
        "a": ServerMode.ASYNCHRONOUS,
        "s": ServerMode.SYNCHRONOUS,
        "x": ServerMode.staleness(bound),
    }[kind]
    draw = random.Random(seed)
    ranks = range(1, workers + 1)
    desk = desk_of(ranks, mode, quorum=draw.randint(1, workers))
    scripts = {rank: Script(rank, draw) for rank in ranks}
    pace = {rank: draw.random() + 0.01 for rank in ranks}
    pushed = dict.fromkeys(ranks, 0)  # since then freed
    applied = dict.fromkeys(ranks, 0)

    def settle() -> None:
        before = dict(desk.clocks.of)
        for action in desk.settle():
            after = dict(desk.clocks.of)
            for rank, clock in after.items():
                if clock > before.get(rank, clock):  # it did a step: it was near enough to begin it
                    assert clock - before[rank] == 1
                    others = [before.get(r, c) for r, c in after.items()]
                    assert before[rank] - min(others) <= mode.bound
            before = after
            if isinstance(action, Apply):
                assert len(set(action.workers)) == len(action.workers)
                assert action.workers == sorted(action.workers)
                assert mode.together or len(action.workers) == 1
                for rank in action.workers:
                    applied[rank] += 1
            elif isinstance(action, Free):
                pushed[action.worker] -= 1
                assert pushed[action.worker] >= 0
            elif isinstance(action, Say):
                hear(scripts[action.worker], action.word)

    def hear(script: Script, word: Word) -> None:
        if word.kind is Kind.WELCOME:
            script.stage = "there"
            desk.heard(script.worker, Word(Kind.JOIN, script.request, word.number))
        elif word.kind is Kind.DONE and script.stage == "there":
            script.done = max(script.done, word.number)
        elif word.kind is Kind.VALUES:
            assert word.request <= script.request

    for _ in range(200):
        rank = draw.choices(list(ranks), [pace[r] for r in ranks])[0]
        script = scripts[rank]
        if draw.random() < 0.003:
            desk.lost(rank)
            script.stage = "gone"
        elif pushed[rank] == 0:  # there is memory for one push
            word = script.next_word()
            if word is not None:
                pushed[rank] += word.kind is Kind.PUSH
                desk.heard(rank, word)
        settle()
        for r in ranks:
            assert applied[r] <= desk.visits[r].pushes
            if scripts[r].stage == "there":
                assert scripts[r].done <= desk.visits[r].pushes <= scripts[r].done + 1
    assert desk.steps >= max(applied.values())
