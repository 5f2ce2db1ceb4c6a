"""Waits of threads, and posted rounds of messages.

Wait                         the object of a thread's wait: a work, or any of several
PostedRound                  a round of a work that is under way
PostedReceive, PostedSend    its parts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from phalanx.core.steps import ANY, NOTHING, Round

if TYPE_CHECKING:
    from phalanx.core.engine import Engine
    from phalanx.core.group import Group
    from phalanx.core.work import Work
    from phalanx.errors import DistributedError

W = TypeVar("W", bound="Wait")
Combine: TypeAlias = "Callable[[int, int, memoryview], None]"
"""Reduces bytes that arrived into a buffer: (buffer, first byte, what arrived)."""


class Wait(ABC):
    """The object of a thread's wait. Ranks are numbered as in `group`.

    name, sequence   for errors; the sequence is -1 if it has none
    deadline         on the engine's clock
    over             whether it has ended, well or not
    """

    __slots__ = ()

    group: Group
    name: str
    sequence: int
    timeout: float
    deadline: float
    error: Exception | None
    over: bool
    is_collective: bool  # whether every member of the group takes part, in the group's order

    @abstractmethod
    def attend(self) -> float:
        """Do due actions, such as asking other ranks; return the seconds to the next. Lock held."""

    @abstractmethod
    def expire(self, error: DistributedError) -> None:
        """End the wait: its deadline has passed."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """End the wait with an error."""

    @abstractmethod
    def waits_for(self) -> list[int]:
        """Return the global ranks from or to which bytes are still to move."""

    @abstractmethod
    def parts(self) -> Iterable[Work[Any]]:
        """Return the works that it waits for."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the wait for messages to users."""

    def waits_for_members(self) -> list[int]:
        """Return `waits_for` as ranks of the group, if they are members."""
        local = self.group.to_local
        return [local[rank] for rank in self.waits_for() if rank in local]


class PostedMessage(ABC):
    """A send or a receive of a round that is under way.

    work    its owner
    peer    a global rank
    view    its memory, until it is complete
    """

    __slots__ = ("done", "peer", "round", "view", "work")

    round: PostedRound
    work: Work[Any]
    peer: int
    view: memoryview
    done: bool

    def complete(self) -> None:
        """Complete the message: it is in place; or has left, and its memory may be used again.

        The last message of a round lets the work go on.
        """
        if self.done:
            return
        posted = self.round
        if posted.poster.moved is not None:
            posted.poster.moved(self)
        self.done = True
        self.view = NOTHING
        del self.round  # a cycle, which only the garbage collector would free
        posted.left -= 1
        if posted.left == 0 and posted.posted:
            posted.poster.ready.append(self.work)


class PostedReceive(PostedMessage):
    """A receive that waits for its message.

    peer    of a receive from `ANY`: the sender of the message that it has matched
    order   receives of one channel take messages in this order
    """

    __slots__ = ("buffer", "combine", "from_any", "order", "start", "stop")

    def __init__(
        self, posted: PostedRound, peer: int, start: int, stop: int, buffer: int, combine: bool
    ) -> None:
        self.round = posted
        self.work = work = posted.work
        self.peer = work.group.ranks[peer] if peer != ANY else ANY
        self.from_any = peer == ANY
        self.order = 0
        self.buffer = buffer
        self.start = start
        self.stop = stop
        self.combine = combine
        self.view = work.buffers[buffer][start:stop] if stop > start else NOTHING
        self.done = False


class PostedSend(PostedMessage):
    """A message on its way out."""

    __slots__ = ()

    def __init__(self, posted: PostedRound, peer: int, start: int, stop: int, buffer: int) -> None:
        self.round = posted
        self.work = work = posted.work
        self.peer = work.group.ranks[peer]
        self.view = work.buffers[buffer][start:stop] if stop > start else NOTHING
        self.done = False


class PostedRound:
    """A round under way: complete when all its sends and receives are.

    left     number of those that are not
    posted   whether all have begun: until then it is not complete
    """

    __slots__ = ("_heard", "_posted_at", "left", "posted", "poster", "receives", "sends", "work")

    def __init__(self, work: Work[Any], round_: Round, poster: Engine) -> None:
        self.work = work
        self.poster = poster
        self.receives = [PostedReceive(self, *receive) for receive in round_.receives]
        self.sends = [PostedSend(self, *send) for send in round_.sends]
        self.left = len(self.sends) + len(self.receives)
        self.posted = False
        self._posted_at = 0.0  # if it is traced
        self._heard = False  # whether a byte has arrived, if it is traced

    def trace(self) -> None:
        """Count the bytes that the round moves; called when it is posted while works are traced."""
        work = self.work
        self._posted_at = self.poster.now()
        work.sent += sum(len(send.view) for send in self.sends)
        work.received += sum(receive.stop - receive.start for receive in self.receives)

    def first_heard(self) -> None:
        """Note the first arrival of a message of this round (called while works are traced)."""
        if not self._heard:
            self._heard = True
            self.work.waited += self.poster.now() - self._posted_at

    def needs(self, rank: int) -> bool:
        """Return whether it cannot complete, now that this rank has left."""
        nobody = ANY if not self.work.group.others() else rank
        parts: list[PostedMessage] = [*self.receives, *self.sends]
        return any(part.peer in (rank, nobody) for part in parts if not part.done)

    def waits_for(self) -> list[int]:
        """Return the ranks that it waits for, as global ranks."""
        group = self.work.group
        parts: list[PostedMessage] = [*self.receives, *self.sends]
        peers: dict[int, None] = {}  # in order: receives come first
        for part in parts:
            if part.done:
                continue
            if part.peer == ANY:
                peers.update(dict.fromkeys(group.ranks[local] for local in group.others()))
            else:
                peers[part.peer] = None
        return list(peers)

    def cancel(self) -> None:
        """Give it up: no longer read or write the caller's memory."""
        self.poster.withdraw(self)
