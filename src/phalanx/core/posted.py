"""What a thread waits for, and a round of messages that is posted.

Wait                         what a thread blocks on: a work, or any of several
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
    """What a thread blocks on. Ranks are named in the numbers of `group`.

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
        """Do what is due, such as asking other ranks; seconds until the next time. Lock held."""

    @abstractmethod
    def expire(self, error: DistributedError) -> None:
        """The deadline has passed."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """End the wait with an error."""

    @abstractmethod
    def waits_for(self) -> list[int]:
        """The global ranks from or to which bytes are still to move."""

    @abstractmethod
    def parts(self) -> Iterable[Work[Any]]:
        """The works that it waits for."""

    @abstractmethod
    def describe(self) -> str:
        """What it is, for messages."""

    def waits_for_members(self) -> list[int]:
        """`waits_for` as ranks of the group, if they are members."""
        local = self.group.to_local
        return [local[rank] for rank in self.waits_for() if rank in local]


class PostedMessage(ABC):
    """A send or a receive of a round that is under way.

    work    whose it is
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
        """The message is where it belongs; or has left, so that its memory may be used again.

        With the last part of a round its work can go on.
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

    left     how many are not
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
        """It is posted while works are traced: count the bytes that it moves."""
        work = self.work
        self._posted_at = self.poster.now()
        work.sent += sum(len(send.view) for send in self.sends)
        work.received += sum(receive.stop - receive.start for receive in self.receives)

    def first_heard(self) -> None:
        """A message of this round begins to arrive (called while works are traced)."""
        if not self._heard:
            self._heard = True
            self.work.waited += self.poster.now() - self._posted_at

    def needs(self, rank: int) -> bool:
        """Whether it cannot complete, now that this rank has left."""
        nobody = ANY if not self.work.group.others() else rank
        parts: list[PostedMessage] = [*self.receives, *self.sends]
        return any(part.peer in (rank, nobody) for part in parts if not part.done)

    def waits_for(self) -> list[int]:
        """The ranks that it waits for, as global ranks."""
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
        """Give it up: from now on it neither reads nor writes the caller's memory."""
        self.poster.withdraw(self)
