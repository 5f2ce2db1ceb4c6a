"""What is asked of another library that moves bytes between ranks: torch's process groups, MPI.

`LibraryEngine` runs over anything that has these two interfaces. A `Library` starts things, a
`Handle` says when they are over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.backends.native import Call, Native
from phalanx.errors import DistributedError, PeerLostError

ANY = -1  # as the peer of a receive: whoever sends first; as `rounds.ANY`


class Abilities(NamedTuple):
    """What a library has of what not every library has. The same on every rank.

    devices      kinds of device on which its collectives take tensors: `cpu`, `cuda`
    messages     whether it moves the processor's memory from one rank to another; without that
                 it does only what `has` says
    largest_tag  of a message; half of the tags are for the rounds of collectives. 0: no tags, and
                 messages of one pair are matched in their order alone
    any_source   whether a receive can take the message of whoever sends first
    subgroups    whether some of its ranks can form a group of their own
    ordered      whether collectives that are started one after the other run in that order by
                 themselves, each when the library comes to it (NCCL, on its stream)
    moves_alone  whether what is under way goes on while nobody waits for it or asks
    sizes        whether a receive finds out that the message has another size than its memory
    """

    devices: frozenset[str] = frozenset({"cpu"})
    messages: bool = True
    largest_tag: int = 2**31 - 1
    any_source: bool = True
    subgroups: bool = True
    ordered: bool = False
    moves_alone: bool = True
    sizes: bool = False


class Handle(ABC):
    """Something under way in the library. Any thread may ask, one at a time.

    The memory that it was given is its own until it is over.
    """

    @abstractmethod
    def done(self) -> bool:
        """Whether it is over, without waiting. Raises what went wrong, whatever the library raises.

        Where the library moves bytes only when it is called, this is such a call.
        """

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Block until it is over, or for about so many seconds; whether it is. Raises as `done`.

        Other threads of this process run meanwhile, and may ask `done()` of other handles. It may
        return early. Of a collective on a device: this thread's stream waits, and it is over.
        """

    @property
    def sender(self) -> int:
        """Of a receive that is over: whose message it was, as a rank of the library's group."""
        raise NotImplementedError

    @property
    def received(self) -> int | None:
        """Of a receive that is over: how many bytes came; None where the library cannot tell."""
        return None

    def cancel(self) -> bool:
        """Try to give it up; whether that was possible, and the library is none the worse for it.

        If so, its memory is free, and a message that it would have received is for the next
        receive. If not, the group is broken, and `Library.abort` frees the memory.
        """
        return False


class Library(Native):
    """One rank's view of one group of the library's. Its methods do not block unless they say so.

    rank, size   this rank in the group, and how many there are
    topology     for each rank the number of the host that it is on
    can          what it has of what not every library has

    Besides: `has(call)` says whether it carries out such a collective (the same answer on every
    rank); called for every collective, so it has to be quick. Messages and collectives do not mix,
    whatever their tags. Methods are called by one thread at a time, except `subgroup`, which runs
    in a thread of its own beside the others.
    """

    rank: int
    size: int
    topology: tuple[int, ...]
    can: Abilities

    @abstractmethod
    def collective(self, call: Call) -> Handle:
        """Start a collective for which `has` is true; every rank starts the same ones in order."""

    @abstractmethod
    def send(self, view: memoryview, peer: int, tag: int) -> Handle:
        """Start to send bytes, perhaps none; over when the memory is free. It may be read-only.

        It may wait for its receive to be posted. Messages with one tag stay in order.
        """

    @abstractmethod
    def recv(self, view: memoryview, peer: int, tag: int) -> Handle:
        """Start to receive from `peer`, or `ANY`, bytes that fill `view`; over when they are in."""

    @abstractmethod
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        """The group of some of this one's ranks, in this order; each of them calls this.

        Blocks until they have, at most `timeout` seconds. `ident` (64 bits) is the group's alone,
        the same on all its members. Their calls for several groups may cross: each runs in a
        thread of its own.
        """

    def kind_of(self, error: Exception) -> type[DistributedError]:
        """What an error of the library's is called here."""
        return PeerLostError

    @abstractmethod
    def close(self) -> None:
        """End in good order: nothing is under way any more. Bounded in time; may be repeated."""

    @abstractmethod
    def abort(self) -> None:
        """End at once, whatever is under way: afterwards its memory is not touched. May repeat."""
