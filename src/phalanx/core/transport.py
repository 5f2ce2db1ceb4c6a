"""`Transport`: moves messages and control messages, waits, and gives out memory.

    send, cancel, finish_send, room  messages between two ranks
    control, tell_members            small messages about groups and waits, between the frames
    wait, poll, wake, background     moving bytes: by a waiting thread, or in the background
    shared, common, alloc            memory, if ranks share it

A transport calls the engine: `matching.arriving` or `deliver` for a message, `on_control` for a
control message, `peer_left` and `peer_lost` for peers that are gone. The engine's lock is held in
all of these, and in the methods here unless they say otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Set
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from phalanx.core.posted import PostedSend, Wait
from phalanx.core.shared_group import SharedGroup
from phalanx.core.steps import Source
from phalanx.wire.control import Answer, Ask, FailureNotice

if TYPE_CHECKING:
    from phalanx.core.call import Members
    from phalanx.core.group import Group
    from phalanx.core.work import Work
    from phalanx.wire.frame import Header

Control: TypeAlias = "FailureNotice | Ask | Answer | None"
"""A control message about a group; None: this rank has closed it."""


class Transport(ABC):
    """Moves the bytes of one rank. Ranks are global ranks.

    single_thread  whether only the rank's own thread may wait: then nothing runs in the background
    refused        the peers whose messages wait for `room`
    """

    single_thread = False
    refused: Set[int] = frozenset()

    @abstractmethod
    def send(self, send: PostedSend) -> None:
        """Start to send a message; call `send.complete()` when its memory is free again."""

    def cancel(self, send: PostedSend) -> None:  # noqa: B027 - not if sends are over at once
        """Give up a send: do not read its memory any more."""

    def finish_send(self, send: PostedSend) -> bool:
        """Complete a late send if its last bytes are on their way; return whether they are."""
        return False

    def room(self, peer: int) -> None:  # noqa: B027 - not if nothing is ever paused
        """Read from a refused peer again: a receive from it was posted."""

    @abstractmethod
    def control(self, peer: int, group: int, message: Control) -> None:
        """Send a control message about a group. Does nothing if the peer is gone."""

    def tell_members(self, group: Group, message: Control) -> None:
        """Tell the other members of a group that it failed, or that this rank has closed it."""
        for rank in group.ranks:
            if rank != group.here:
                self.control(rank, group.id, message)

    # Waiting --------------------------------------------------------------------------------

    @abstractmethod
    def wait(self, until: Wait) -> None:
        """Move bytes until `until` is over; past its deadline it fails. Lock not held."""

    @abstractmethod
    def poll(self, work: Work[Any]) -> None:
        """Move the bytes that can be moved without waiting. Lock not held."""

    def glance(self, now: float) -> None:  # noqa: B027 - not all need to do a thing
        """Poll the sockets at intervals: a call begins that may end without waiting."""

    def check_peers(self) -> None:  # noqa: B027 - not if the engine is told at once
        """Look which peers are gone, without waiting."""

    def silent(self) -> Collection[int]:
        """Return the peers that were not heard for a while; those of them may be gone already."""
        return ()

    def wake(self, work: Work[Any]) -> None:  # noqa: B027 - not if threads look by themselves
        """Wake the threads that wait for a work that has ended."""

    def background(  # noqa: B027 - not all need to do a thing
        self, work: Work[Any], *, patience: float
    ) -> None:
        """Move this work on while no thread waits for it. Lock not held.

        patience   seconds for which it is left to a thread that may wait for it
        """

    def watch(self) -> None:  # noqa: B027 - not all need to do a thing
        """Wake the thread that sleeps in `wait`: a step has begun that has to be polled."""

    def every(  # noqa: B027 - not all need to do a thing
        self, seconds: float, callback: Callable[[], object]
    ) -> None:
        """Call back at intervals while this rank moves bytes or waits. Lock not held.

        It is held in the callback. Never without peers, or while the rank is in no call.
        """

    # Memory ---------------------------------------------------------------------------------

    def shared(self, group: Group) -> SharedGroup | None:
        """Return the memory that this rank shares with members of a group, if there is any."""
        return None

    def alloc(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in memory that is sent without a copy. Lock not held."""
        return torch.empty(shape, dtype=dtype)

    def common(self, group: Group) -> Source | None:
        """Return the source of memory that all members of a group can have in common, or None.

        The same answer on every one of them.
        """
        return None


# ------------------------------------------------------------------------------
# The shared memory of a host's ranks, as a transport over sockets uses it.


class Ring(Protocol):
    """Memory for large messages to a rank of this host, and from it.

    least    bytes of the smallest message that goes this way
    piece    bytes of a part of a message
    pieces   number of parts that there is room for
    """

    least: int
    piece: int
    pieces: int

    def put(self, send: PostedSend, offset: int) -> bytes | None:
        """Put in a message's next part; return its frame, or None while there is no room."""

    def came(self, header: Header, payload: bytes) -> tuple[Header, memoryview]:
        """Take such a frame: return the header of the message's part, and its bytes in the memory.

        Raises `FrameError` for an invalid one.
        """

    def taken(self, count: int) -> None:
        """Free the oldest parts, which have been read: the peer may use their memory again."""

    def when_free(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when there is room; there is none now."""

    def give_up(self) -> None:
        """Cancel `when_free`: nothing more is to be sent."""


class HostMemory(Protocol):
    """Memory that the ranks of this host share, and the descriptors that wake waiting ranks.

    A rank that waits for another one's word in memory says that it sleeps (`park`), looks at the
    word once more, and sleeps until `wakeup` is readable.

    memory, wakeup_end   file descriptors that the ranks of this host open, to attach and to wake
    wakeup               the file descriptor that is readable when this rank is woken
    begins_to_wait       called when a ring begins to wait for room
    """

    memory: int
    wakeup: int
    wakeup_end: int
    begins_to_wait: Callable[[], None]

    @property
    def is_parked(self) -> bool:
        """Return whether this rank has announced that it sleeps."""

    @property
    def stalled(self) -> Mapping[Any, Callable[[], None]]:
        """Return the rings without room, and the functions to call when they have some."""

    def resume_stalled(self) -> None:
        """Go on with the rings that have room again."""

    def park(self) -> None:
        """Announce that this rank sleeps. The caller then checks its condition once more."""

    def unpark(self) -> None:
        """Announce that this rank is awake."""

    def on_wakeup(self, readable: bool, writable: bool) -> None:
        """Empty `wakeup`, which is readable."""

    def ring(self, peer: int) -> Ring | None:
        """Return the memory for large messages to and from a peer, once it is attached."""

    def shared(self, group: Members) -> SharedGroup | None:
        """Return the shared memory of a group's members on this host, if there are others."""

    def source(self) -> Source:
        """Return a source of memory that ranks of this host have in common."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in memory that this rank shows to the others."""

    def detach(self) -> None:
        """Keep a forked child's writes to itself."""

    def close(self) -> None:
        """Let no rank attach this one's memory, or wake it, any more."""


# ------------------------------------------------------------------------------
# The costs of messages, for the choice of an algorithm.


class LinkCost(NamedTuple):
    """The cost of a message, for the choice of an algorithm. The same on every rank."""

    latency: float  # seconds until the receiver can go on
    overhead: float  # seconds of work for each message sent or received
    bandwidth: float  # bytes a second
    duplex: bool  # whether sending and receiving at the same time takes no longer than either


class Links(NamedTuple):
    """The links of a group. All ranks of a host share one bandwidth out of it, and one into it."""

    inside: LinkCost  # a host
    between: LinkCost  # hosts
    processors: float = inf  # of a host, which its ranks share; the same number on all of them


# Inside a host a byte costs a processor's time on either side, between hosts the wire's. Measured
# with 2, 3 and 4 processes on two processors, as the times of all algorithms of all_reduce, from
# 8 bytes to 16 MiB, in turn.
INSIDE_A_HOST = LinkCost(latency=70e-6, overhead=20e-6, bandwidth=2.5e9, duplex=False)
# A message in a ring buffer costs a third of that, measured with 2 processes, 512 KiB to 8 MiB.
IN_SHARED_MEMORY = INSIDE_A_HOST._replace(bandwidth=8e9)
BETWEEN_HOSTS = LinkCost(latency=100e-6, overhead=20e-6, bandwidth=1.2e9, duplex=True)
