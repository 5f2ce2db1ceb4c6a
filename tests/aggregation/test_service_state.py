"""The protocol of a server, without a message: every order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.aggregation import ServerMode
from phalanx.aggregation.parameter_server.state import (
    Action,
    ApplyUpdate,
    Disconnect,
    ReleaseBuffer,
    Reply,
    ServerState,
)
from phalanx.aggregation.parameter_server.wire import MessageHeader, MessageKind

A, B, C = 1, 2, 3


def state_of(workers, mode=ServerMode.SYNCHRONOUS, quorum=None) -> ServerState:
    return ServerState(workers, mode, len(workers) if quorum is None else quorum, digest=7)


def send(
    state: ServerState, worker: int, kind: MessageKind, request: int = 1, number: int = 0
) -> list[Action]:
    state.received(worker, MessageHeader(kind, request, number))
    return list(state.actions())


def join(state: ServerState, worker: int, clock: int | None = None) -> list[Action]:
    (answer,) = send(state, worker, MessageKind.HELLO, number=7)
    assert isinstance(answer, Reply)
    assert answer.header.kind is MessageKind.WELCOME
    return send(
        state, worker, MessageKind.JOIN, number=answer.header.number if clock is None else clock
    )


def done(worker: int, request: int, number: int) -> Reply:
    return Reply(worker, MessageHeader(MessageKind.DONE, request, number))


def values(worker: int, request: int, steps: int) -> Reply:
    return Reply(worker, MessageHeader(MessageKind.VALUES, request, steps))


def test_a_step_of_all_is_one_step_of_the_mean_and_is_over_when_the_last_has_pushed() -> None:
    state = state_of([A, B])
    join(state, A)
    assert send(state, A, MessageKind.PULL, 2) == [values(A, 2, 0)]
    assert send(state, A, MessageKind.PUSH, 3, 1) == []  # B may come yet
    join_b = join(state, B)
    assert join_b == [done(A, 3, 1)]
    assert send(state, A, MessageKind.PULL, 4, 1) == []
    assert send(state, B, MessageKind.PUSH, 9, 1) == [
        done(B, 9, 1),
        ApplyUpdate([A, B]),
        ReleaseBuffer(A),
        ReleaseBuffer(B),
        values(A, 4, 1),
    ]


def test_a_push_that_comes_again_counts_once() -> None:
    for mode in (ServerMode.ASYNCHRONOUS, ServerMode.staleness(0)):
        state = state_of([A], mode)
        join(state, A)
        assert send(state, A, MessageKind.PUSH, 5, 1) == [
            ApplyUpdate([A]),
            ReleaseBuffer(A),
            done(A, 5, 1),
        ]
        assert send(state, A, MessageKind.PUSH, 6, 1) == [ReleaseBuffer(A), done(A, 6, 1)]
        assert send(state, A, MessageKind.SKIP, 7, 1) == [done(A, 7, 1)]
        assert (state.steps, state.sessions[A].pushes) == (1, 1)


def test_what_two_hold_counts_in_turn_as_soon_as_it_may() -> None:
    state = state_of([A, B], ServerMode.staleness(1))
    join(state, A)
    join(state, B)
    for number in (1, 2):
        assert done(A, number, number) in send(state, A, MessageKind.PUSH, number, number)
    assert send(state, A, MessageKind.PUSH, 3, 3) == []  # 2 - 0 > 1
    assert send(state, A, MessageKind.PULL, 4, 2) == []
    assert send(state, B, MessageKind.PUSH, 1, 1) == [
        ApplyUpdate([B]),
        ReleaseBuffer(B),
        done(B, 1, 1),
        ApplyUpdate([A]),
        ReleaseBuffer(A),
        done(A, 3, 3),
    ]
    assert send(state, B, MessageKind.BYE, 2) == [done_bye(B, 2), Disconnect(B), values(A, 4, 4)]


def done_bye(worker: int, request: int) -> Reply:
    return Reply(worker, MessageHeader(MessageKind.DONE, request))


def test_a_step_that_is_skipped_by_all_is_no_step_of_the_optimizer() -> None:
    state = state_of([A, B])
    join(state, A)
    join(state, B)
    assert send(state, A, MessageKind.SKIP, 2, 1) == [done(A, 2, 1)]
    assert send(state, B, MessageKind.SKIP, 2, 1) == [done(B, 2, 1)]
    assert (state.steps, state.round) == (0, 1)
    send(state, A, MessageKind.SKIP, 3, 2)
    assert send(state, B, MessageKind.PUSH, 3, 2) == [
        done(B, 3, 2),
        ApplyUpdate([B]),
        ReleaseBuffer(B),
    ]


def test_who_leaves_is_not_waited_for_and_what_it_has_pushed_counts() -> None:
    state = state_of([A, B])
    join(state, A)
    join(state, B)
    send(state, A, MessageKind.PUSH, 2, 1)
    assert send(state, A, MessageKind.BYE, 3) == [done_bye(A, 3), Disconnect(A)]
    assert send(state, B, MessageKind.PUSH, 2, 1) == [
        done(B, 2, 1),
        ApplyUpdate([A, B]),
        ReleaseBuffer(A),
        ReleaseBuffer(B),
    ]
    send(state, B, MessageKind.BYE, 3)
    assert not state.is_open


def test_no_step_of_all_ends_between_a_greeting_and_joining() -> None:
    """Of two servers one was a step ahead when C came: it joins both at the later step."""
    ahead, behind = state_of([A, C], quorum=1), state_of([A, C], quorum=1)
    for state in (ahead, behind):
        join(state, A)
    send(ahead, A, MessageKind.PUSH, 2, 1)
    (one,), (two,) = (send(state, C, MessageKind.HELLO, 1, 7) for state in (ahead, behind))
    assert (one.header.number, two.header.number) == (1, 0)
    assert send(behind, A, MessageKind.PUSH, 2, 1) == [done(A, 2, 1)]
    assert send(behind, A, MessageKind.PULL, 3, 1) == []
    assert send(behind, C, MessageKind.JOIN, number=1) == [
        ApplyUpdate([A]),
        ReleaseBuffer(A),
        values(A, 3, 1),
    ]
    assert send(ahead, C, MessageKind.JOIN, number=1) == []
    for state in (ahead, behind):
        send(state, C, MessageKind.PUSH, 2, 1)
        assert ApplyUpdate([A, C]) in send(state, A, MessageKind.PUSH, 4, 2)


def test_the_lost_are_not_waited_for_and_what_they_held_is_dropped() -> None:
    state = state_of([A, B, C], ServerMode.staleness(0))
    join(state, A)
    join(state, B)
    assert done(A, 2, 1) not in send(state, A, MessageKind.PUSH, 2, 1)  # C may come
    state.lost(C)
    assert list(state.actions()) == [ApplyUpdate([A]), ReleaseBuffer(A), done(A, 2, 1)]
    assert send(state, A, MessageKind.PUSH, 3, 2) == []
    state.lost(A)
    assert list(state.actions()) == []
    assert send(state, B, MessageKind.PUSH, 2, 1) == [
        ApplyUpdate([B]),
        ReleaseBuffer(B),
        done(B, 2, 1),
    ]
    assert state.sessions[A].pushes == 1


@pytest.mark.parametrize(
    "kind",
    [
        MessageKind.JOIN,
        MessageKind.PULL,
        MessageKind.PUSH,
        MessageKind.SKIP,
        MessageKind.BYE,
        MessageKind.DONE,
    ],
)
def test_what_nobody_sends_before_hello_is_an_error(kind: MessageKind) -> None:
    with pytest.raises(ValueError, match=f"it says {kind.name} when it is COMING"):
        send(state_of([A]), A, kind)


class Script:
    """A worker that pushes and pulls in any rhythm, repeats what it may have sent, and leaves."""

    def __init__(self, worker: int, draw: random.Random) -> None:
        self.worker, self.draw = worker, draw
        self.request = self.number = self.done = 0
        self.stage = "away"

    def next_header(self) -> MessageHeader | None:
        self.request += 1
        if self.stage == "away":
            self.stage = "greeting"
            return MessageHeader(MessageKind.HELLO, self.request, 7)
        if self.stage == "there":
            choice = self.draw.random()
            if choice < 0.02:
                self.stage = "gone"
                return MessageHeader(MessageKind.BYE, self.request)
            if choice < 0.4:
                return MessageHeader(MessageKind.PULL, self.request, self.done)
            return MessageHeader(
                MessageKind.SKIP if choice < 0.45 else MessageKind.PUSH, self.request, self.done + 1
            )
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
    state = state_of(ranks, mode, quorum=draw.randint(1, workers))
    scripts = {rank: Script(rank, draw) for rank in ranks}
    pace = {rank: draw.random() + 0.01 for rank in ranks}
    pushed = dict.fromkeys(ranks, 0)  # since then released
    applied = dict.fromkeys(ranks, 0)

    def act() -> None:
        before = dict(state.clocks)
        for action in state.actions():
            after = dict(state.clocks)
            for rank, clock in after.items():
                if clock > before.get(rank, clock):  # it did a step: it was near enough to begin it
                    assert clock - before[rank] == 1
                    others = [before.get(r, c) for r, c in after.items()]
                    assert before[rank] - min(others) <= mode.bound
            before = after
            if isinstance(action, ApplyUpdate):
                assert len(set(action.workers)) == len(action.workers)
                assert action.workers == sorted(action.workers)
                assert mode.together or len(action.workers) == 1
                for rank in action.workers:
                    applied[rank] += 1
            elif isinstance(action, ReleaseBuffer):
                pushed[action.worker] -= 1
                assert pushed[action.worker] >= 0
            elif isinstance(action, Reply):
                receive(scripts[action.worker], action.header)

    def receive(script: Script, header: MessageHeader) -> None:
        if header.kind is MessageKind.WELCOME:
            script.stage = "there"
            state.received(
                script.worker, MessageHeader(MessageKind.JOIN, script.request, header.number)
            )
        elif header.kind is MessageKind.DONE and script.stage == "there":
            script.done = max(script.done, header.number)
        elif header.kind is MessageKind.VALUES:
            assert header.request <= script.request

    for _ in range(200):
        rank = draw.choices(list(ranks), [pace[r] for r in ranks])[0]
        script = scripts[rank]
        if draw.random() < 0.003:
            state.lost(rank)
            script.stage = "gone"
        elif pushed[rank] == 0:  # there is memory for one push
            header = script.next_header()
            if header is not None:
                pushed[rank] += header.kind is MessageKind.PUSH
                state.received(rank, header)
        act()
        for r in ranks:
            assert applied[r] <= state.sessions[r].pushes
            if scripts[r].stage == "there":
                assert scripts[r].done <= state.sessions[r].pushes <= scripts[r].done + 1
    assert state.steps >= max(applied.values())
