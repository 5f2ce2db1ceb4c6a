"""The desk: the protocol of one server. What came goes in, what is to be done comes out.

It does no I/O and holds no tensor: who receives and sends tells it what was `heard` and who was
`lost`, and then does what `settle` yields. So a test can play through every order of events.

                HELLO                JOIN                     BYE, or it was lost
    coming ---------------> greeted ----------> joined ------------------------------> gone
               -> WELCOME             PULL, PUSH, SKIP -> VALUES, DONE, DONE

A push waits at the desk until its step may begin (modes.py). Where gradients are applied together
it counts then, and is kept until those of all that have joined are in; their mean is one step.
While somebody is between greeted and joined no such step ends, so that it joins at the same one on
all servers.
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

from phalanx.aggregation.parameter_server.wire import Kind, Word


class Say(NamedTuple):
    """Answer a worker: with the parameters, if the word is VALUES; with the list, if DIFFERS."""

    worker: int
    word: Word


class Apply(NamedTuple):
    """Make the mean of what these workers have pushed one step of the optimizer."""

    workers: list[int]


class Free(NamedTuple):
    """What this worker has pushed is not needed any more: the next may be received."""

    worker: int


class Part(NamedTuple):
    """A worker is gone in good order."""

    worker: int


Action = Say | Apply | Free | Part


class State(Enum):
    """How far a worker has come."""

    COMING = 0
    GREETED = 1
    JOINED = 2
    GONE = 3


class Visit:
    """One worker at the desk.

    pushes   how many steps it has done: of a push that comes twice the second does not count
    held     what it has pushed, or skipped, that does not count yet
    pull     the parameters that it waits for; a later request takes the place of an earlier one
    """

    def __init__(self) -> None:
        self.state = State.COMING
        self.pushes = 0
        self.held: deque[Word] = deque()
        self.pull: Word | None = None


class Desk:
    """What one server knows of its workers.

    steps   of the optimizer
    round   of a mode that applies together: how many steps of all are over, which have no more
            steps of the optimizer than that
    """

    def __init__(self, workers: Iterable[int], mode: ServerMode, quorum: int, digest: int) -> None:
        self.visits = {worker: Visit() for worker in workers}
        self.clocks = Clocks(self.visits, mode.bound, quorum)
        self.steps = 0
        self.round = 0
        self._mode = mode
        self._digest = digest
        self._in_round: dict[int, Kind] = {}  # who has done this round's step, and how
        self._out: deque[Action] = deque()

    @property
    def is_open(self) -> bool:
        """Whether any worker is there, or may come."""
        return any(visit.state is not State.GONE for visit in self.visits.values())

    @property
    def _now(self) -> int:
        """The clock of whoever joins now."""
        return self.round if self._mode.together else self.clocks.slowest

    def heard(self, worker: int, word: Word) -> None:
        """A worker says something; with a PUSH, its gradients are all here."""
        visit = self.visits[worker]
        if visit.state not in _MAY_SAY[word.kind]:
            raise ValueError(f"it says {word.kind.name} when it is {visit.state.name}")
        if word.kind is Kind.HELLO:
            self._greet(worker, visit, word)
        elif word.kind is Kind.JOIN:
            visit.state = State.JOINED
            self.clocks.join(worker, max(word.number, self._now))
        elif word.kind is Kind.PULL:
            visit.pull = word
        elif word.kind is Kind.BYE:
            self._leave(worker, visit)
            self._out += (Say(worker, Word(Kind.DONE, word.request)), Part(worker))
        else:
            visit.held.append(word)

    def lost(self, worker: int) -> None:
        """A worker is gone without a word: it is not waited for any more."""
        visit = self.visits[worker]
        if visit.state is not State.GONE:
            self._leave(worker, visit)

    def settle(self) -> Iterator[Action]:
        """What is to be done now, in this order; what has been done counts for what comes next."""
        while True:
            while self._out:
                yield self._out.popleft()
            if not (any([self._take_one_push(), self._end_round()]) or self._out):
                break
        for worker, visit in self.visits.items():
            pull = visit.pull
            if pull is not None and self._may_pull(worker, visit, pull):
                visit.pull = None
                yield Say(worker, Word(Kind.VALUES, pull.request, self.steps))

    def _greet(self, worker: int, visit: Visit, word: Word) -> None:
        if word.number != self._digest:
            self._out.append(Say(worker, Word(Kind.DIFFERS, word.request)))
            return
        visit.state = State.GREETED
        self._out.append(Say(worker, Word(Kind.WELCOME, word.request, self._now)))

    def _leave(self, worker: int, visit: Visit) -> None:
        """What it has pushed that does not count is dropped."""
        visit.state = State.GONE
        visit.held.clear()
        visit.pull = None
        self.clocks.leave(worker)

    def _take_one_push(self) -> bool:
        """Let one push count that may, if there is one."""
        for worker, visit in self.visits.items():
            if not visit.held or visit.state is not State.JOINED:
                continue
            word = visit.held[0]
            is_new = word.number > visit.pushes
            if is_new and not (self.clocks.is_open and self._may_begin(worker)):
                continue
            visit.held.popleft()
            kept = is_new and self._count(worker, visit, word.kind)
            if word.kind is Kind.PUSH and not kept:
                self._out.append(Free(worker))
            self._out.append(Say(worker, Word(Kind.DONE, word.request, word.number)))
            return True
        return False

    def _count(self, worker: int, visit: Visit, kind: Kind) -> bool:
        """A step of a worker's counts; whether its gradients are kept for the round."""
        visit.pushes += 1
        self.clocks.tick(worker)
        if self._mode.together:
            self._in_round[worker] = kind
            return kind is Kind.PUSH
        if kind is Kind.PUSH:
            self.steps += 1
            self._out.append(Apply([worker]))
        return False

    def _end_round(self) -> bool:
        """Apply what all that have joined have pushed, if they have."""
        if not self._in_round or self._waited_for():
            return False
        pushed = sorted(worker for worker, kind in self._in_round.items() if kind is Kind.PUSH)
        self._in_round.clear()
        self.round += 1
        if pushed:
            self.steps += 1
            self._out.append(Apply(pushed))
            self._out += (Free(worker) for worker in pushed)
        return True

    def _waited_for(self) -> list[int]:
        """Whom this round waits for, of those that have come."""
        greeted = [w for w, visit in self.visits.items() if visit.state is State.GREETED]
        return greeted + [w for w, clock in self.clocks.of.items() if clock <= self.round]

    def _may_pull(self, worker: int, visit: Visit, pull: Word) -> bool:
        joined = visit.state is State.JOINED
        return joined and pull.number <= visit.pushes and self._may_begin(worker)

    def _may_begin(self, worker: int) -> bool:
        """Whether a worker that has joined may begin its next step."""
        if self._mode.together:  # the last one is over, also where that waits for who is greeted
            return self.clocks.of[worker] <= self.round
        return self.clocks.may_begin(worker)


_HERE = frozenset({State.GREETED, State.JOINED})  # a push may overtake the JOIN before it
_MAY_SAY: Mapping[Kind, frozenset[State]] = MappingProxyType(
    {
        Kind.HELLO: frozenset({State.COMING}),
        Kind.JOIN: frozenset({State.GREETED}),
        Kind.PULL: _HERE,
        Kind.PUSH: _HERE,
        Kind.SKIP: _HERE,
        Kind.BYE: _HERE,
        **dict.fromkeys((Kind.WELCOME, Kind.DIFFERS, Kind.VALUES, Kind.DONE), frozenset[State]()),
    }
)


# ------------------------------------------------------------------------------
# Clocks: who has joined, how many steps each has done, and who may begin the next one.
#
# A worker's clock counts its pushes, from where the slowest was when it joined:
#
#     rank 1   0 - 1 - 2 - 3 - 4 - 5      with a bound of 2, rank 1 may not begin its next step:
#     rank 2   0 - 1 - 2                  it is 5 - 2 = 3 ahead. Rank 3 came late, and began where
#     rank 3           2 - 3 - 4          the slowest was


class Clocks:
    """Those of all workers of one server.

    of       the clocks of the workers that have joined and not left
    coming   the workers that have not joined yet, and may
    """

    def __init__(self, workers: Iterable[int], bound: float, quorum: int) -> None:
        self.of: dict[int, int] = {}
        self.coming = set(workers)
        self._bound = bound
        self._quorum = quorum
        self._joined = 0
        self._latest_slowest = 0

    @property
    def slowest(self) -> int:
        """The clock of the slowest that has joined; if none is there, what it was last."""
        if self.of:
            self._latest_slowest = min(self.of.values())
        return self._latest_slowest

    @property
    def is_open(self) -> bool:
        """Whether as many have joined as steps wait for, or as many as can."""
        return self._joined >= min(self._quorum, self._joined + len(self.coming))

    def join(self, worker: int, clock: int) -> None:
        """A worker is there, and has done so many steps."""
        self.coming.remove(worker)
        self.of[worker] = clock
        self._joined += 1

    def leave(self, worker: int) -> None:
        """It is not waited for any more."""
        self._latest_slowest = self.slowest
        self.coming.discard(worker)
        self.of.pop(worker, None)

    def tick(self, worker: int) -> None:
        """It has done a step."""
        self.of[worker] += 1

    def may_begin(self, worker: int) -> bool:
        """Whether it is not too far ahead of the slowest to begin its next step."""
        return self.of[worker] - self.slowest <= self._bound


# ------------------------------------------------------------------------------
# Modes: when a worker may begin its next step, and what is applied together. Rows of one table.
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
    bound      how many steps a worker may be ahead of the slowest that has joined
    together   whether the gradients of a step are averaged, and are one step of the optimizer; then
               nobody may be missing: a worker that is lost is everyone's error, not its own
    """

    name: str
    bound: float
    together: bool

    SYNCHRONOUS: ClassVar[ServerMode]
    ASYNCHRONOUS: ClassVar[ServerMode]

    @staticmethod
    def staleness(bound: int) -> ServerMode:
        """Each at most `bound` steps ahead of the slowest. ValueError for a negative number."""
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
# What a server has done so far: for its `on_step`, and in the end.


@dataclass
class ServiceRecord:
    """The service as one of its servers sees it. It changes while the service goes on.

    rank        the server's
    numbers     which of the parameters it has, by their places in the list
    params      these, the caller's own tensors: as they are after the last step
    optimizer   theirs; None if it has none
    steps       of the optimizer
    clocks      of the workers that have joined and not left: steps each has done, counted from
                where the slowest was when it joined
    pushes      of every worker that has joined: how many of its steps count here
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
