"""The state of one server: messages go in, actions come out. It does no I/O and holds no tensor.

                HELLO                JOIN                     BYE, or it was lost
    coming ---------------> greeted ----------> joined ------------------------------> gone
               -> WELCOME             PULL, PUSH, SKIP -> VALUES, DONE, DONE

The server calls `received` for a message and `lost` for a lost worker, and then does the actions
that `actions` yields. So a test can play through every order of events.

A push waits until its step may begin (see modes, below). In synchronous mode it counts then, and is
kept until all workers that have joined have pushed; the mean is one step. While a worker is between
greeted and joined, no such step ends: it joins at the same one on all servers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from phalanx.aggregation.parameter_server.wire import MessageHeader, MessageKind

# ------------------------------------------------------------------------------
# Modes: the start of a worker's next step, and gradients applied together. Rows of one table.
#
#                     ahead of the slowest   the server applies              as in
#     SYNCHRONOUS     0 steps                the mean of a step of all       one process
#     staleness(s)    s steps                each push when it comes         Ho et al. 2013, "SSP"
#     ASYNCHRONOUS    any number             each push when it comes         Recht et al. 2011; Dean
#                                                                            et al. 2012
#
# A worker that has done c steps may begin step c+1 while c - min <= s, min being how many the
# slowest has done that has joined. So with staleness(0) they go in lock-step, but each push is a
# step of the optimizer by itself.


@dataclass(frozen=True)
class ServerMode:
    """A row: `SYNCHRONOUS`, `ASYNCHRONOUS`, or `staleness(s)`.

    name       as it is written in messages
    bound      steps that a worker may be ahead of the slowest that has joined
    together   whether the gradients of a step are averaged, and are one step of the optimizer; then
               no worker may be missing: a lost worker is everyone's error, not its own
    """

    name: str
    bound: float
    together: bool

    SYNCHRONOUS: ClassVar[ServerMode]
    ASYNCHRONOUS: ClassVar[ServerMode]

    @staticmethod
    def staleness(bound: int) -> ServerMode:
        """Return the mode of at most `bound` steps ahead of the slowest; ValueError below 0."""
        if bound < 0:
            raise ValueError(f"staleness({bound}): nobody is ahead by fewer steps than 0")
        return ServerMode("staleness", bound, together=False)

    def __str__(self) -> str:
        if self.name == "staleness":
            return f"staleness({self.bound})"
        return self.name.upper()

    __repr__ = __str__


ServerMode.SYNCHRONOUS = ServerMode("synchronous", 0, together=True)
ServerMode.ASYNCHRONOUS = ServerMode("asynchronous", math.inf, together=False)


# ------------------------------------------------------------------------------
# Actions, for the server to do.


class Reply(NamedTuple):
    """Answer a worker: with the parameters after VALUES; with their list after DIFFERS."""

    worker: int
    header: MessageHeader


class ApplyUpdate(NamedTuple):
    """Take one step of the optimizer along the mean of these workers' gradients."""

    workers: list[int]


class ReleaseBuffer(NamedTuple):
    """Free the memory of this worker's push: the next may be received."""

    worker: int


class Disconnect(NamedTuple):
    """Close the connection of a worker that has left in good order."""

    worker: int


Action = Reply | ApplyUpdate | ReleaseBuffer | Disconnect


# ------------------------------------------------------------------------------
# Sessions: each worker's progress, and its wait.


class SessionState(Enum):
    """The states of a worker's session."""

    COMING = 0
    GREETED = 1
    JOINED = 2
    GONE = 3


_HERE = (SessionState.GREETED, SessionState.JOINED)  # a push may overtake its JOIN
_VALID_IN: Mapping[MessageKind, tuple[SessionState, ...]] = MappingProxyType(
    {
        MessageKind.HELLO: (SessionState.COMING,),
        MessageKind.JOIN: (SessionState.GREETED,),
        MessageKind.PULL: _HERE,
        MessageKind.PUSH: _HERE,
        MessageKind.SKIP: _HERE,
        MessageKind.BYE: _HERE,
    }
)


@dataclass
class WorkerSession:
    """One worker, as a server knows it.

    pushes   number of its steps: of a push that comes twice the second does not count
    held     pushes and skipped steps that do not count yet
    pull     the parameters that it waits for; a later request takes the place of an earlier one
    """

    state: SessionState = SessionState.COMING
    pushes: int = 0
    held: deque[MessageHeader] = field(default_factory=deque)
    pull: MessageHeader | None = None


class ServerState:
    """One server's view of its workers.

    steps    of the optimizer
    round    in synchronous mode: the number of finished common steps, which have no more
             steps of the optimizer than that
    clocks   number of steps of each worker that has joined and not left. They count pushes,
             from the slowest worker's clock at the time of joining:

        rank 1   0 - 1 - 2 - 3 - 4 - 5      with a bound of 2, rank 1 may not begin its next step:
        rank 2   0 - 1 - 2                  it is 5 - 2 = 3 ahead. Rank 3 came late, and began where
        rank 3           2 - 3 - 4          the slowest was
    """

    def __init__(self, workers: Iterable[int], mode: ServerMode, quorum: int, digest: int) -> None:
        self.sessions = {worker: WorkerSession() for worker in workers}
        self.clocks: dict[int, int] = {}
        self.steps = 0
        self.round = 0
        self._mode = mode
        self._quorum = quorum
        self._digest = digest
        self._joined = 0  # ever
        self._latest_slowest = 0
        self._in_round: dict[int, MessageKind] = {}  # this round's steps, by worker
        self._out: deque[Action] = deque()

    @property
    def is_open(self) -> bool:
        """Return whether any worker is there, or may come."""
        return any(s.state is not SessionState.GONE for s in self.sessions.values())

    @property
    def _slowest(self) -> int:
        """Return the clock of the slowest that has joined; without any, the last such clock."""
        if self.clocks:
            self._latest_slowest = min(self.clocks.values())
        return self._latest_slowest

    @property
    def _has_quorum(self) -> bool:
        """Return whether `quorum` workers have joined, or all that can."""
        may_join = (SessionState.COMING, SessionState.GREETED)
        return self._joined >= self._quorum or not self._any_is(*may_join)

    def _any_is(self, *states: SessionState) -> bool:
        return any(session.state in states for session in self.sessions.values())

    def received(self, worker: int, header: MessageHeader) -> None:
        """Take a worker's message; the gradients of a PUSH are all here. ValueError for a message
        that a worker does not send in its state.
        """
        session = self.sessions[worker]
        kind, request, number = header
        if session.state not in _VALID_IN.get(kind, ()):
            raise ValueError(f"it says {kind.name} when it is {session.state.name}")
        now = self.round if self._mode.together else self._slowest
        if kind is MessageKind.HELLO and number != self._digest:
            self._reply(worker, MessageKind.DIFFERS, request)
        elif kind is MessageKind.HELLO:
            session.state = SessionState.GREETED
            self._reply(worker, MessageKind.WELCOME, request, now)
        elif kind is MessageKind.JOIN:
            session.state = SessionState.JOINED
            self.clocks[worker] = max(number, now)
            self._joined += 1
        elif kind is MessageKind.PULL:
            session.pull = header
        elif kind is MessageKind.BYE:
            self.lost(worker)
            self._reply(worker, MessageKind.DONE, request)
            self._out.append(Disconnect(worker))
        else:
            session.held.append(header)

    def lost(self, worker: int) -> None:
        """Take a worker as gone: do not wait for it, drop pushes that do not count."""
        session = self.sessions[worker]
        session.state = SessionState.GONE
        session.held.clear()
        session.pull = None
        self._latest_slowest = self._slowest
        self.clocks.pop(worker, None)

    def actions(self) -> Iterator[Action]:
        """Yield the next actions, in order; each one done changes those that follow."""
        while True:
            while self._out:
                yield self._out.popleft()
            if not (any([self._take_one_push(), self._end_round()]) or self._out):
                break
        for worker, session in self.sessions.items():
            pull = session.pull
            if (
                pull is not None
                and session.state is SessionState.JOINED
                and pull.number <= session.pushes
                and self._may_begin(worker)
            ):
                session.pull = None
                yield Reply(worker, MessageHeader(MessageKind.VALUES, pull.request, self.steps))

    def _reply(self, worker: int, kind: MessageKind, request: int, number: int = 0) -> None:
        self._out.append(Reply(worker, MessageHeader(kind, request, number)))

    def _take_one_push(self) -> bool:
        """Let one waiting push count, if one may; keep its gradients in synchronous mode."""
        for worker, session in self.sessions.items():
            if not session.held or session.state is not SessionState.JOINED:
                continue
            kind, request, number = session.held[0]
            is_new, has_gradients = number > session.pushes, kind is MessageKind.PUSH
            if is_new and not (self._has_quorum and self._may_begin(worker)):
                continue
            session.held.popleft()
            if is_new:
                session.pushes += 1
                self.clocks[worker] += 1
            if is_new and self._mode.together:
                self._in_round[worker] = kind
            elif has_gradients:
                if is_new:
                    self.steps += 1
                    self._out.append(ApplyUpdate([worker]))
                self._out.append(ReleaseBuffer(worker))
            self._reply(worker, MessageKind.DONE, request, number)
            return True
        return False

    def _end_round(self) -> bool:
        """Apply the pushes of a round once all workers that have joined have pushed."""
        behind = any(clock <= self.round for clock in self.clocks.values())
        if not self._in_round or self._any_is(SessionState.GREETED) or behind:
            return False
        pushed = sorted(w for w, kind in self._in_round.items() if kind is MessageKind.PUSH)
        self._in_round.clear()
        self.round += 1
        if pushed:
            self.steps += 1
            self._out.append(ApplyUpdate(pushed))
            self._out += (ReleaseBuffer(worker) for worker in pushed)
        return True

    def _may_begin(self, worker: int) -> bool:
        """Return whether a worker that has joined may begin its next step."""
        clock = self.clocks[worker]
        if self._mode.together:  # the last one is over, also where that waits for who is greeted
            return clock <= self.round
        return clock - self._slowest <= self._mode.bound


# ------------------------------------------------------------------------------
# A server's work so far: for its `on_step`, and at the end.


@dataclass
class ServiceRecord:
    """The service as one of its servers sees it. It changes while the service goes on.

    rank        the server's
    numbers     of its parameters: their places in the list
    params      these, the caller's own tensors: as they are after the last step
    optimizer   theirs; None if it has none
    steps       of the optimizer
    clocks      steps of each worker that has joined and not left, counted from
                the slowest worker's clock at the time of joining
    pushes      number of counted steps of every worker that has joined
    dropped     the workers that were lost, and why
    """

    rank: int
    numbers: list[int]
    params: list[Tensor]
    optimizer: torch.optim.Optimizer | None
    steps: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    pushes: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
