"""Interfaces of what is under way on a rank, and the parts of a round that is posted.

    Wait        what a thread blocks on
    WorkBase    a call that is being carried out; `work.py` implements it
    GroupBase   its group; `group.py` implements it
    Poster      carries out rounds; the engine implements it

    PostedRound, PostedReceive, PostedSend    a round of a work under way, and its parts

Transports, matching, the watchdog and the engine know a work through these interfaces only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

from typing_extensions import override

from phalanx.core.call import Call, Members
from phalanx.core.checker import Checker
from phalanx.core.steps import ANY, NOTHING, Round, SharedGroup, Step
from phalanx.wire.frame import Channel, Kind

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

    buffers    as bytes
    combine    reduces bytes that arrive into a buffer
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

    def __init__(
        self,
        group: GroupBase,
        call: Call,
        channel: Channel,
        buffers: tuple[memoryview, ...],
        combine: Combine | None,
    ) -> None:
        self.group = group
        self.call = call
        self.channel = channel
        self.is_collective = channel.kind is Kind.COLLECTIVE
        self.buffers = buffers
        self.combine = combine
        self.timeout = call.timeout
        self.deadline = call.started + call.timeout
        self.ask_at = call.started + group.checker.ask_every
        self.sender = -1
        self.waited = 0.0
        self.sent = self.received = 0
        self.step: Step | None = None
        self.over = False
        self.error: Exception | None = None

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
    """Carries out rounds. `now` is the clock, in seconds."""

    now: Callable[[], float]

    @abstractmethod
    def post(self, posted: PostedRound) -> None:
        """Start a round: receives first, so that an answer finds its receive posted."""

    @abstractmethod
    def withdraw(self, posted: PostedRound) -> None:
        """Give up what is left of a round. Lock held."""

    @abstractmethod
    def completed(self, work: WorkBase) -> None:
        """The step of a work is complete: it can go on."""


class PostedReceive:
    """A receive that waits for its message.

    work    whose receive it is
    peer    a global rank; of a receive from `ANY`, the sender of the message that it has matched
    order   receives of one channel take messages in this order
    """

    __slots__ = (
        "buffer",
        "combine",
        "done",
        "from_any",
        "order",
        "peer",
        "round",
        "start",
        "stop",
        "view",
        "work",
    )

    def __init__(
        self, posted: PostedRound, peer: int, buffer: int, start: int, stop: int, combine: bool
    ) -> None:
        self.round = posted
        self.work = work = posted.work
        self.peer = peer
        self.from_any = peer == ANY
        self.order = 0
        self.buffer = buffer
        self.start = start
        self.stop = stop
        self.combine = combine
        self.view = work.buffers[buffer][start:stop] if stop > start else NOTHING
        self.done = False

    def complete(self) -> None:
        """The message is where it belongs."""
        if not self.done:
            self.done = True
            self.view = NOTHING
            posted = self.round
            del self.round  # a cycle, which only the garbage collector would free
            posted.part_done()


class PostedSend:
    """A message of `work` on its way out. `peer` is a global rank."""

    __slots__ = ("done", "peer", "round", "view", "work")

    def __init__(self, posted: PostedRound, peer: int, buffer: int, start: int, stop: int) -> None:
        self.round = posted
        self.work = work = posted.work
        self.peer = peer
        self.view = work.buffers[buffer][start:stop] if stop > start else NOTHING
        self.done = False

    def complete(self) -> None:
        """The memory may be used again."""
        if not self.done:
            self.done = True
            self.view = NOTHING
            posted = self.round
            del self.round  # a cycle, which only the garbage collector would free
            posted.part_done()


class PostedRound(Step):
    """A round under way: complete when all its sends and receives are.

    The last part to finish puts the work into the engine's queue of those that can go on.
    """

    __slots__ = ("_heard", "_left", "_posted_at", "_poster", "posted", "receives", "sends", "work")

    notifies: ClassVar[bool] = True

    def __init__(self, work: WorkBase, round_: Round, poster: Poster) -> None:
        self.work = work
        self._poster = poster
        ranks = work.group.ranks
        self.receives = [
            PostedReceive(self, ranks[peer] if peer != ANY else ANY, buffer, start, stop, combine)
            for peer, start, stop, buffer, combine in round_.receives
        ]
        self.sends = [
            PostedSend(self, ranks[peer], buffer, start, stop)
            for peer, start, stop, buffer in round_.sends
        ]
        self._left = len(self.sends) + len(self.receives)
        self.posted = False  # whether all parts are posted: until then it is not complete
        self._posted_at = 0.0  # if it is traced
        self._heard = False  # whether a byte has arrived, if it is traced

    @override
    def begin(self, call: Call) -> None:
        """Post every receive, then start every send (the engine does that)."""
        self._poster.post(self)

    @override
    def ready(self, *, spin: bool = False) -> bool:
        return self.posted and self._left == 0

    def part_done(self) -> None:
        """One send or receive is complete."""
        self._left -= 1
        if self.posted and self._left == 0:
            self._poster.completed(self.work)

    def trace(self) -> None:
        """It is posted while works are traced: count the bytes that it moves."""
        work = self.work
        self._posted_at = self._poster.now()
        work.sent += sum(len(send.view) for send in self.sends)
        work.received += sum(receive.stop - receive.start for receive in self.receives)

    def first_heard(self) -> None:
        """A message of this round begins to arrive (called while works are traced)."""
        if not self._heard:
            self._heard = True
            self.work.waited += self._poster.now() - self._posted_at

    @override
    def needs(self, rank: int) -> bool:
        nobody = ANY if not self.work.group.others() else rank
        parts: list[PostedReceive | PostedSend] = [*self.receives, *self.sends]
        return any(part.peer in (rank, nobody) for part in parts if not part.done)

    @override
    def waits_for(self) -> list[int]:
        group = self.work.group
        parts: list[PostedReceive | PostedSend] = [*self.receives, *self.sends]
        peers: dict[int, None] = {}  # in order: receives come first
        for part in parts:
            if part.done:
                continue
            if part.peer == ANY:
                peers.update(dict.fromkeys(group.ranks[local] for local in group.others()))
            else:
                peers[part.peer] = None
        return list(peers)

    @override
    def cancel(self) -> None:
        self._poster.withdraw(self)
