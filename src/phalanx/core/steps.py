"""Steps: what a collective or a message of one rank consists of, one after the other.

A program is an iterator of steps. There are three kinds:

    Round    messages that may happen together, bound to bytes: what plans are made of
    epoch    a barrier in shared memory (`transport/shm/control.py`)
    native   a collective that another library carries out whole (`native/`)

A `Round` is data, shared by all calls of its kind; `PostedRound` is one that is under way. The
others are steps themselves. What a rank does alone between two steps, such as to add what has
arrived, the program does when it is asked for the next step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from phalanx.core.work import Call, Work

ANY = -1  # as the peer of a receive: whoever sends first
NOTHING = memoryview(b"")  # instead of memory that is not needed any more: these are in cycles


class SendBytes(NamedTuple):
    """`buffers[buffer][start:stop]` goes to `peer`, a rank of the group."""

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


class Step(ABC):
    """One step under way. Ranks are global ranks."""

    __slots__ = ()

    notifies: ClassVar[bool] = (
        False  # whether it says itself when it is complete; else it is polled
    )
    wakes: ClassVar[bool] = (
        True  # whether this rank is woken when it may be; else from time to time
    )
    blocks: ClassVar[bool] = False  # whether a thread may wait in `block`

    @abstractmethod
    def begin(self, call: Call) -> None:
        """Do this rank's part. Called again, it does nothing."""

    @abstractmethod
    def ready(self, *, spin: bool = False) -> bool:
        """Whether it is complete. With `spin` it may wait for that, a bounded time."""

    def block(self, seconds: float) -> bool:
        """Wait for it, with the lock released meanwhile, for about so long at most. Lock held.

        False if that cannot be now: it has not waited.
        """
        return False

    @abstractmethod
    def waits_for(self) -> list[int]:
        """The ranks without which it does not complete."""

    def needs(self, rank: int) -> bool:
        """Whether it cannot complete, now that this rank has left."""
        return rank in self.waits_for()

    def diverged(self) -> int | None:
        """A rank that is seen to take part in another collective, if there is one."""
        return None

    def cancel(self) -> None:  # noqa: B027 - an epoch, for one, holds nothing
        """Give up what is left of it: the caller's memory is neither read nor written any more."""


Program: TypeAlias = "Round | Step"
"""What a program yields."""


class PostedReceive:
    """A receive that waits for its message.

    peer    a global rank; of a receive from `ANY`, the one whose message it has met
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
    )

    def __init__(
        self, posted: PostedRound, peer: int, buffer: int, start: int, stop: int, combine: bool
    ) -> None:
        self.round = posted
        self.peer = peer
        self.from_any = peer == ANY
        self.order = 0
        self.buffer = buffer
        self.start = start
        self.stop = stop
        self.combine = combine
        self.view = posted.work.buffers[buffer][start:stop] if stop > start else NOTHING
        self.done = False

    @property
    def work(self) -> Work[Any]:
        """Whose receive it is."""
        return self.round.work

    def complete(self) -> None:
        """The message is where it belongs."""
        if not self.done:
            self.done = True
            self.view = NOTHING
            posted = self.round
            del self.round  # which lists this: the garbage collector would have to come
            posted.part_done()


class PostedSend:
    """A message on its way out. `peer` is a global rank."""

    __slots__ = ("done", "peer", "round", "view")

    def __init__(self, posted: PostedRound, peer: int, buffer: int, start: int, stop: int) -> None:
        self.round = posted
        self.peer = peer
        self.view = posted.work.buffers[buffer][start:stop] if stop > start else NOTHING
        self.done = False

    @property
    def work(self) -> Work[Any]:
        """Whose message it is."""
        return self.round.work

    def complete(self) -> None:
        """The memory may be used again."""
        if not self.done:
            self.done = True
            self.view = NOTHING
            posted = self.round
            del self.round  # which lists this: the garbage collector would have to come
            posted.part_done()


class PostedRound(Step):
    """A round under way: complete when all its sends and receives are.

    The last part to finish puts the work into the engine's queue of those that can go on.
    """

    __slots__ = ("_heard", "_left", "_posted_at", "posted", "receives", "sends", "work")

    notifies: ClassVar[bool] = True

    def __init__(self, work: Work[Any], round_: Round) -> None:
        self.work = work
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
        self.posted = False  # whether all parts are: until then nobody is told of the end
        self._posted_at = 0.0  # if it is traced
        self._heard = False  # whether a byte has come, if it is traced

    @override
    def begin(self, call: Call) -> None:
        """Post every receive, then start every send (the engine does that)."""
        self.work.group.engine.post(self)

    @override
    def ready(self, *, spin: bool = False) -> bool:
        return self.posted and self._left == 0

    def part_done(self) -> None:
        """One send or receive is complete."""
        self._left -= 1
        if self.posted and self._left == 0:
            self.work.group.engine.ready.append(self.work)

    def trace(self, work: Work[Any]) -> None:
        """It is posted while operations are traced: count what it moves."""
        self._posted_at = monotonic()
        work.sent += sum(len(send.view) for send in self.sends)
        work.received += sum(receive.stop - receive.start for receive in self.receives)

    def first_heard(self) -> None:
        """A message of this round begins to come (called while operations are traced)."""
        if not self._heard:
            self._heard = True
            self.work.waited += monotonic() - self._posted_at

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
        self.work.group.engine.withdraw(self)


def ring_barrier(rank: int, size: int) -> tuple[Round, ...]:
    """Nobody leaves before everybody has arrived: a token goes round the ring twice.

    The first wave tells rank 0 that all have arrived, the second tells all that rank 0 knows.

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
# What shared memory and other libraries bring, as the core sees it.


class SharedGroup(Protocol):
    """The memory that members of a group share on this rank's host."""

    @property
    def size(self) -> int:
        """How many of the group's members share it."""
        ...

    def epoch(self, *, first: bool = False) -> Step:
        """The step in which this rank arrives at the next epoch."""
        ...

    def give_up(self) -> None:
        """What is under way has failed: memory that this rank has shown may be written now."""
        ...

    def close(self) -> None:
        """This rank takes part no more."""
        ...


class NativeCall(NamedTuple):
    """One collective of another library, ready to begin: what it is, and this rank's memory.

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
    """What another library under a backend can carry out whole."""

    @abstractmethod
    def step(self, call: NativeCall) -> Step | None:
        """The step that does it, or None if the library has not this collective.

        The same answer on every rank.
        """

    def close(self) -> None:  # noqa: B027 - not all need to do a thing
        """The group was closed. Lock held."""
