"""A ticket: one posted round, and what of it is still under way."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Protocol

from phalanx.backends.engine.rounds import ANY

if TYPE_CHECKING:
    from phalanx.backends.engine.operation import Operation


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
        "heard",
        "meeting",
        "operation",
        "posted",
        "receives",
        "sends",
    )

    def __init__(self, operation: Operation, meeting: Meeting | None = None) -> None:
        self.operation = operation
        self.meeting = meeting
        self.sends: list[PostedSend] = []
        self.receives: list[PostedReceive] = []
        self.done = False
        self.posted = 0.0  # when, if it is traced
        self.heard = False  # whether a byte has come, if it is traced
        self._left = 0
        self._armed = False

    def arm(self, *, meeting: bool = False) -> None:
        """Everything is posted: from now on the last part to finish calls the engine.

        meeting   whether others have still to come
        """
        self._left += len(self.sends) + len(self.receives) + meeting
        self._armed = True
        if self._left == 0:
            self.done = True

    def part_done(self) -> None:
        """One send or receive is complete, or the meeting is."""
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
        return self.meeting.absent() if self.meeting is not None and not self.done else []
