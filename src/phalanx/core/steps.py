"""One round, bound to bytes: the sends and receives that may happen together.

Collectives are written over chunk numbers; a plan binds them to byte ranges once, and what a
backend gets to see is this. Peers are ranks of the group. `buffer` says in which of the
operation's buffers the range lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from phalanx.core.work import Operation
ANY = -1  # as the peer of a receive: whoever sends first


class SendBytes(NamedTuple):
    """`buffers[buffer][start:stop]` goes to `peer`."""

    peer: int
    start: int
    stop: int
    buffer: int = 0


class ReceiveBytes(NamedTuple):
    """What `peer` (or `ANY`) sends is written to `buffers[buffer][start:stop]`, or combined."""

    peer: int
    start: int
    stop: int
    buffer: int = 0
    combine: bool = False


class Round(NamedTuple):
    """Sends and receives that do not depend on each other."""

    sends: tuple[SendBytes, ...] = ()
    receives: tuple[ReceiveBytes, ...] = ()


Step = Any
"""What an engine carries out, and an operation waits for: a `Round`, or what it has besides."""


class Epoch(Protocol):
    """A barrier in shared memory, as a step of a collective."""

    def begin(self, rolling_hash: int) -> None:
        """Arrive, having been asked to do all that this rolling hash stands for."""
        ...

    def spin(self) -> bool:
        """Wait a bounded time; whether all have arrived, with the same rolling hash."""
        ...


class SharedGroup(Protocol):
    """The memory that members of a group share on this rank's host, as the core sees it."""

    @property
    def size(self) -> int:
        """How many of the group's members share it."""
        ...

    def epoch(self, *, first: bool = False) -> Epoch:
        """The step in which this rank arrives at the next epoch."""
        ...

    def give_up(self) -> None:
        """What is under way has failed: memory that this rank has shown may be written now."""
        ...

    def close(self) -> None:
        """This rank takes part no more."""
        ...


def ring_barrier(rank: int, size: int) -> tuple[Round, ...]:
    """Nobody leaves before everybody has come: a token goes round the ring twice.

    The first wave tells rank 0 that all have come, the second tells all that rank 0 knows.

        0 -> 1 -> 2 -> 0     all are here
        0 -> 1 -> 2 -> 0     all may leave

    2p messages of no bytes.
    """
    if size == 1:
        return ()
    send = Round(sends=(SendBytes((rank + 1) % size, 0, 0),))
    receive = Round(receives=(ReceiveBytes((rank - 1) % size, 0, 0),))
    wave = (send, receive) if rank == 0 else (receive, send)
    return wave + wave


# ------------------------------------------------------------------------------
# A ticket: one posted round, and what of it is still under way.

NOTHING = memoryview(b"")  # instead of memory that is not needed any more: these are in cycles


class PostedReceive:
    """A receive that waits for its message.

    peer    a rank of the whole job; of a receive from `ANY`, the one whose message it has met
    order   receives of one channel take messages in this order
    """

    __slots__ = (
        "buffer",
        "combine",
        "done",
        "from_any",
        "order",
        "peer",
        "start",
        "stop",
        "ticket",
        "view",
    )

    def __init__(
        self, ticket: Ticket, peer: int, buffer: int, start: int, stop: int, combine: bool
    ) -> None:
        self.ticket = ticket
        self.peer = peer
        self.from_any = peer == ANY
        self.order = 0
        self.buffer = buffer
        self.start = start
        self.stop = stop
        self.combine = combine
        self.view = ticket.operation.bytes_of(buffer, start, stop)
        self.done = False

    def complete(self) -> None:
        """The message is where it belongs."""
        if not self.done:
            self.done = True
            self.view = NOTHING
            ticket = self.ticket
            del self.ticket  # which lists this: the garbage collector would have to come
            ticket.part_done()


class PostedSend:
    """A message on its way out. `peer` is a rank of the whole job."""

    __slots__ = ("done", "peer", "ticket", "view")

    def __init__(self, ticket: Ticket, peer: int, buffer: int, start: int, stop: int) -> None:
        self.ticket = ticket
        self.peer = peer
        self.view = ticket.operation.bytes_of(buffer, start, stop)
        self.done = False

    def complete(self) -> None:
        """The memory may be used again."""
        if not self.done:
            self.done = True
            self.view = NOTHING
            ticket = self.ticket
            del self.ticket  # which lists this: the garbage collector would have to come
            ticket.part_done()


class Meeting(Protocol):
    """What an operation may wait for, besides messages: that others come to the same point."""

    def absent(self) -> list[int]:
        """Those that have not come, as ranks of the whole job."""
        ...


class Ticket:
    """One step under way: done when all its sends and receives are, or everyone has come."""

    __slots__ = (
        "_armed",
        "_left",
        "done",
        "epoch",
        "heard",
        "operation",
        "posted",
        "receives",
        "sends",
    )

    def __init__(self, operation: Operation, epoch: Meeting | None = None) -> None:
        self.operation = operation
        self.epoch = epoch
        self.sends: list[PostedSend] = []
        self.receives: list[PostedReceive] = []
        self.done = False
        self.posted = 0.0  # when, if it is traced
        self.heard = False  # whether a byte has come, if it is traced
        self._left = 0
        self._armed = False

    def arm(self, *, epoch: bool = False) -> None:
        """Everything is posted: from now on the last part to finish calls the engine.

        epoch   whether others have still to come
        """
        self._left += len(self.sends) + len(self.receives) + epoch
        self._armed = True
        if self._left == 0:
            self.done = True

    def part_done(self) -> None:
        """One send or receive is complete, or the epoch is."""
        self._left -= 1
        if self._armed and self._left == 0:
            self.done = True
            self.operation.group.engine.ready.append(self.operation)

    def first_heard(self) -> None:
        """A message of this round begins to come (called while operations are traced)."""
        if not self.heard:
            self.heard = True
            self.operation.waited += monotonic() - self.posted

    def needs(self, rank: int) -> bool:
        """Whether this round cannot be completed without a rank (of the job) that has left."""
        group = self.operation.group
        if rank in self._absent():
            return True
        nobody = ANY if not group.others() else rank
        parts: list[PostedReceive | PostedSend] = [*self.receives, *self.sends]
        return any(part.peer in (rank, nobody) for part in parts if not part.done)

    def outstanding_peers(self) -> list[int]:
        """The peers (ranks of the group) that this step waits for; receives come first."""
        group = self.operation.group
        parts: list[PostedReceive | PostedSend] = [*self.receives, *self.sends]
        peers: dict[int, None] = dict.fromkeys(group.to_local[peer] for peer in self._absent())
        for part in parts:
            if part.done:
                continue
            if part.peer == ANY:
                peers.update(dict.fromkeys(group.others()))
            else:
                peers[group.to_local[part.peer]] = None
        return list(peers)

    def _absent(self) -> list[int]:
        return self.epoch.absent() if self.epoch is not None and not self.done else []


# ------------------------------------------------------------------------------
# Collectives that a backend has of its own: another library's, which know its wires better.
#
# `collectives/` asks the backend first (`Backend.native`). What the library has, it carries out
# whole: the `Call` is then the one step of the operation. What it has not is done with rounds of
# messages, as on any backend.


class Call(NamedTuple):
    """One collective, ready to begin: what it is, and this rank's memory.

    collective   `all_reduce`, `reduce`, `broadcast`, `all_gather`, `gather`, `scatter`,
                 `reduce_scatter`, `all_to_all` or `barrier`
    source       what this rank gives, contiguous, never written; None where it gives nothing
    out          where its result goes, contiguous; None where it gets none
    op           how contributions are reduced, as `ReduceOp`'s value: `sum`, `mean`, ...
    root         rank of the group, where the collective has one

        collective       source                   out
        all_reduce       [n]                      [n], perhaps the same memory
        reduce           [n]                      [n], perhaps the same memory; on the root only
        broadcast        [n], on the root only    [n], on the root perhaps the same memory
        all_gather       [n]                      [p, n], which `source` may be a part of
        gather           [n]                      [p, n], on the root only
        scatter          [p, n], on the root      [n]
        reduce_scatter   [p, n]                   [n]
        all_to_all       [p, n]                   [p, n], other memory
    """

    collective: str
    source: Tensor | None = None
    out: Tensor | None = None
    op: str | None = None
    root: int = 0


class Native(ABC):
    """What a backend's own library can do."""

    @abstractmethod
    def has(self, call: Call) -> bool:
        """Whether the library carries out such a call: the same answer on every rank."""
