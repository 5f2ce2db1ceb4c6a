"""What is asked of another library that moves bytes between ranks: torch's process groups, MPI.

`LibraryEngine` runs over anything that has these two interfaces. A `Library` starts things, a
`Handle` says when they are over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from typing_extensions import override

from phalanx.core.steps import Call, Native, Ticket
from phalanx.core.work import Operation
from phalanx.errors import DistributedError, PeerLostError


class Abilities(NamedTuple):
    """What a library has of what not every library has. The same on every rank.

    devices      kinds of device on which its collectives take tensors: `cpu`, `cuda`
    subgroups    whether some of its ranks can form a group of their own
    ordered      whether a collective runs behind those that were started before, and behind what
                 this thread's stream does, without being waited for in between (NCCL)
    calls_back   whether it says when a message is over, by calling `news`; else it is asked again
                 and again, and moves bytes when it is
    """

    devices: frozenset[str] = frozenset({"cpu"})
    subgroups: bool = True
    ordered: bool = False
    calls_back: bool = False


class Handle(ABC):
    """Something under way in the library. Any thread may ask, one at a time.

    The memory that it was given is the library's until it is over.

    on_stream   `wait` does not wait, but makes this thread's stream do so
    """

    on_stream = False

    @abstractmethod
    def done(self) -> bool:
        """Whether it is over, without waiting. Raises what went wrong, as the library puts it.

        Where the library moves bytes only when it is called, this is such a call.
        """

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Block until it is over, or for about so many seconds; whether it is. Raises as `done`.

        Other threads of this process run meanwhile, and may ask other handles. It may return
        early.
        """


class Library(Native):
    """One rank's view of one group of the library's. Its methods do not block unless they say so.

    name         of the library, for messages
    rank, size   this rank in the group, and how many there are
    can          what it has of what not every library has
    news         to be called, by any thread, when a message is over; see `Abilities.calls_back`

    Besides: `has(call)` says whether it carries out such a collective, the same on every rank. It
    is asked for every collective, so it has to be quick. Messages and collectives do not mix,
    whatever their tags. Methods are called by one thread at a time, except `subgroup`, which runs
    in a thread of its own beside the others.
    """

    name: str
    rank: int
    size: int
    can: Abilities

    def __init__(self) -> None:
        self.news: Callable[[], None] = _nothing

    @abstractmethod
    def collective(self, call: Call) -> Handle:
        """Start a collective for which `has` is true; every rank starts the same ones in order."""

    @abstractmethod
    def send(self, view: memoryview, peer: int, tag: int) -> Handle:
        """Start to send at least one byte; over when the memory is free. It may be read-only.

        tag   0 or 1; messages of one peer and tag stay in order, and the two do not mix

        It may wait for its receive to be posted, which is of exactly that size.
        """

    @abstractmethod
    def recv(self, view: memoryview, peer: int, tag: int) -> Handle:
        """Start to receive the bytes that fill `view`; over when they are in."""

    @abstractmethod
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        """The group of some of this one's ranks, in this order, for collectives only.

        Each of them calls this, and is blocked until all have, at most `timeout` seconds. `ident`
        (64 bits) is the group's alone, the same on all its members. Calls for several groups may
        cross: each runs in a thread of its own.
        """

    def kind_of(self, error: Exception) -> type[DistributedError]:
        """What an error of the library's is called here."""
        return PeerLostError

    @abstractmethod
    def close(self) -> None:
        """End: nothing is under way any more but receives of messages that will not come.

        Bounded in time; may be repeated, also after `abort`.
        """

    @abstractmethod
    def abort(self) -> None:
        """End at once what is under way; if that can be, its memory is not touched from now on.

        Groups that were formed of it are not concerned. May be repeated.
        """


def _nothing() -> None:
    pass


# ------------------------------------------------------------------------------
# A collective of a library's own that is under way: the ticket of a `Call`.


class CallTicket(Ticket):
    """A collective of the library's under way: it needs all members, to the end."""

    __slots__ = ("busy", "call", "handle")

    def __init__(self, operation: Operation, call: Call) -> None:
        super().__init__(operation)
        self.call = call
        self.handle: Handle | None = None  # None: the group is being formed
        self.busy = False  # a thread waits for the handle

    @override
    def needs(self, rank: int) -> bool:
        return not self.done and rank in self.operation.group.to_local

    @override
    def outstanding_peers(self) -> list[int]:
        group = self.operation.group
        return [rank for rank in range(group.size) if rank != group.rank]


class Begun(NamedTuple):
    """A collective that was begun without an operation, as the step of one that goes on with it."""

    call: Call
    handle: Handle | None
    error: BaseException | None = None  # what came of it, if that was not its end
