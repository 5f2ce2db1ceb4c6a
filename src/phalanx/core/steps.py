"""Steps: the parts of one rank's collective or message, one after the other.

A program is an iterator of steps. There are three kinds:

    Round    messages that may happen together, bound to bytes: the parts of plans
    epoch    a barrier in shared memory (`shared_group.py`)
    native   a collective that another library carries out whole (`native/`)

A `Round` is data, shared by all calls of its kind; one that is under way is a `PostedRound`
(`posted.py`). The other two are a `Step`. Local work between two steps, such as adding what
has arrived, is done by the program when it is asked for the next step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, NamedTuple, TypeAlias

from torch import Tensor, UntypedStorage

from phalanx.core.call import Call
from phalanx.core.reduce_op import ReduceOp

ANY = -1  # as the peer of a receive: the first sender
NOTHING = memoryview(b"")  # replaces memory that is done with, so that cycles do not keep it


class SendBytes(NamedTuple):
    """A message of `buffers[buffer][start:stop]` to `peer`, a rank of the group."""

    peer: int
    start: int
    stop: int
    buffer: int = 0


class ReceiveBytes(NamedTuple):
    """A message from `peer` (or `ANY`) into `buffers[buffer][start:stop]`, or combined there."""

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
    """An epoch or a native collective under way, which is polled. Ranks are global ranks."""

    __slots__ = ()

    # Whether a parked rank is woken when it may be complete; if not, it is polled at intervals.
    wakes: ClassVar[bool] = True
    # Whether a thread may wait in `block`.
    blocks: ClassVar[bool] = False

    @abstractmethod
    def begin(self, call: Call) -> None:
        """Do this rank's part. Called again, it does nothing."""

    @abstractmethod
    def ready(self, *, spin: float = 0.0) -> bool:
        """Return whether it is complete. It may wait for that, `spin` seconds at most."""

    def block(self, seconds: float) -> bool:
        """Wait for it for about `seconds` at most, with the lock released. Lock held.

        False if it could not wait now.
        """
        return False

    @abstractmethod
    def waits_for(self) -> list[int]:
        """Return the ranks that it waits for."""

    def needs(self, rank: int) -> bool:
        """Return whether it cannot complete, now that this rank has left."""
        return rank in self.waits_for()

    def diverged(self) -> int | None:
        """Return a rank in it with another rolling hash, so in another collective, if any."""
        return None

    def awaited(self) -> int | None:
        """Return the rank that came last, of those it has waited for since the last question.

        None if it has waited for nobody, and `ANY` if nobody knows for whom.
        """
        return ANY

    def cancel(self) -> None:  # noqa: B027 - an epoch, for one, holds nothing
        """Give it up: from now on it neither reads nor writes the caller's memory."""


Program: TypeAlias = "Round | Step"
"""What a program yields."""


def ring_barrier(rank: int, size: int) -> tuple[Round, ...]:
    """A barrier by messages: a token goes round the ring twice.

    After the first round rank 0 knows that all have arrived; the second tells the others.

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
# Interfaces of memory that ranks have in common, and of other libraries.


Place: TypeAlias = "tuple[int, int, int]"
"""Where memory is, so that other ranks can attach it; each `Source` has its own meaning."""
NOWHERE: Place = (0, 0, 0)


class Source(ABC):
    """Allocates or attaches such memory, once. Called with the engine's lock held or without."""

    @abstractmethod
    def take(self, size: int) -> tuple[UntypedStorage, Place]:
        """Allocate so many bytes, all zero. Raises OSError, RuntimeError or MemoryError."""

    @abstractmethod
    def attach(self, place: Place, size: int) -> UntypedStorage:
        """Attach the memory that another rank has allocated."""

    @abstractmethod
    def close(self) -> None:
        """Let nobody attach the memory any more. Attached memory stays."""


class NativeCall(NamedTuple):
    """One collective of another library, ready to begin, with this rank's memory.

    collective   `all_reduce`, `reduce`, `broadcast`, `all_gather`, `gather`, `scatter`,
                 `reduce_scatter` or `all_to_all`
    source       this rank's contribution, contiguous, never written; None for nothing
    out          memory for its result, contiguous; None for no result
    op           the reduction, if there is one
    root         rank of the group, if the collective has one

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
    op: ReduceOp | None = None
    root: int = 0


class Native(ABC):
    """The collectives of another library, which it carries out whole."""

    @abstractmethod
    def steps(self, call: NativeCall) -> Iterable[Program] | None:
        """Return the steps that carry it out, or None if the library lacks this collective.

        The same answer on every rank.
        """

    def close(self) -> None:  # noqa: B027 - not all need to do a thing
        """Close its part of the group. Lock held."""
