"""Interfaces of what is under way on a rank, and the parts of a round that is posted.

    Wait        what a thread blocks on
    WorkBase    a call that is being carried out; `work.py` implements it
    GroupBase   its group; `group.py` implements it
    Poster      carries out rounds; the engine implements it

    PostedRound, PostedReceive, PostedSend    a round of a work that is under way, and its parts

Transports, matching, the watchdog and the engine know a work through these interfaces only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from typing_extensions import override

from phalanx.core.call import Call, Members
from phalanx.core.checker import Checker
from phalanx.core.steps import ANY, NOTHING, Round, SharedGroup, Step
from phalanx.wire.frame import Channel

if TYPE_CHECKING:
    from phalanx.core.failure import Failure
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

    group: GroupBase
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
    def parts(self) -> Iterable[WorkBase]:
        """The works that it waits for."""

    @abstractmethod
    def describe(self) -> str:
        """What it is, for messages."""

    def waits_for_members(self) -> list[int]:
        """`waits_for` as ranks of the group, if they are members."""
        local = self.group.to_local
        return [local[rank] for rank in self.waits_for() if rank in local]


class WorkBase(Wait):
    """A call that is being carried out: its step, and the memory of its rounds.

    buffers    as bytes; looked up when a round is posted
    combine    reduces bytes that arrive into a buffer
    step       which it is in, if it is in one
    ask_at     when it asks the other ranks whether they are in the same collective
    sender     of a received message, as a global rank
    waited     if it is traced: seconds until the first byte of each round arrived,
    sent, received   and bytes moved
    """

    __slots__ = (
        "ask_at",
        "buffers",
        "call",
        "channel",
        "combine",
        "deadline",
        "error",
        "group",
        "is_collective",
        "over",
        "received",
        "sender",
        "sent",
        "step",
        "timeout",
        "waited",
    )

    call: Call
    channel: Channel
    buffers: Sequence[memoryview]
    combine: Combine | None
    step: Step | PostedRound | None
    ask_at: float
    sender: int
    waited: float
    sent: int
    received: int

    @property
    def name(self) -> str:  # type: ignore[override]
        """For errors."""
        return self.call.name

    @property
    def sequence(self) -> int:  # type: ignore[override]
        """For errors."""
        return self.call.sequence

    @abstractmethod
    def advance(self) -> None:
        """Go on from the step that is complete, as far as possible without waiting. Lock held."""

    @override
    def expire(self, error: DistributedError) -> None:
        self.group.work_failed(self, error)

    @override
    def parts(self) -> Iterable[WorkBase]:
        return (self,)

    @override
    def waits_for(self) -> list[int]:
        step = self.group.head_of_queue(self).step
        return step.waits_for() if step is not None else []

    @override
    def describe(self) -> str:
        return self.call.describe()


class GroupBase(Members, ABC):
    """One rank's view of one group: its works, and its failure.

    checker    whether its members do the same things in the same order
    left       members, as global ranks, that have closed the group
    finished   the number of its collectives that are over on this rank
    shared     memory that members on this rank's host share
    """

    checker: Checker
    left: set[int]
    finished: int
    shared: SharedGroup | None
    failure: Failure | None
    closed: bool

    @abstractmethod
    def others(self) -> list[int]:
        """The other members, by their ranks here, that have not left."""

    @abstractmethod
    def under_way(self) -> list[WorkBase]:
        """Everything that has begun and not ended; the collectives first, in their order."""

    @abstractmethod
    def head_of_queue(self, wait: W) -> WorkBase | W:
        """What has to end before this wait can: the wait itself, unless it is queued."""

    @abstractmethod
    def was_blocked(self, seconds: float) -> None:
        """A call of this group has blocked for so long."""

    @abstractmethod
    def work_failed(self, work: WorkBase, error: Exception) -> None:
        """A work cannot be completed. If it is a collective, neither can the group."""

    @abstractmethod
    def break_alone(self, work: WorkBase, error: DistributedError) -> None:
        """End a work and break the group without telling: the others know it, too."""

    @abstractmethod
    def fail(self, failure: Failure, *, tell: bool = True) -> None:
        """Break the group: whatever is under way in it ends with this failure."""

    @abstractmethod
    def close(self) -> None:
        """End what is under way, and what was made of it; later calls are a `MisuseError`."""

    @abstractmethod
    def member_left(self, rank: int) -> None:
        """A member has closed the group, in good order: only who waits for it cannot go on."""


class Poster(ABC):
    """Carries out rounds.

    now     the clock, in seconds
    ready   works whose step is complete: they can go on
    moved   is told of each message that is about to be complete; None: nobody counts them
    """

    now: Callable[[], float]
    ready: deque[WorkBase]
    moved: Callable[[PostedMessage], None] | None

    @abstractmethod
    def post(self, work: WorkBase, round_: Round) -> bool:
        """Begin a round, as `work.step`; whether it is complete already. Lock held."""

    @abstractmethod
    def withdraw(self, posted: PostedRound) -> None:
        """Give up what is left of a round. Lock held."""


class PostedMessage(ABC):
    """A send or a receive of a round that is under way.

    work    whose it is
    peer    a global rank
    view    its memory, until it is complete
    """

    __slots__ = ("done", "peer", "round", "view", "work")

    round: PostedRound
    work: WorkBase
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

    def __init__(self, work: WorkBase, round_: Round, poster: Poster) -> None:
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
