"""The host domain: what the ranks of one host share, as one of them has it.

    directory        where this rank says what memory it shows
    arena         that memory
    local peers    the other ranks of the host: their ledgers, and the bells that wake them
    ring buffers         for each of them, what large messages go through
    control blocks       for each group, what its members show each other

A rank that waits for a flag looks at it for a short while, and then sleeps until a local peer rings
its wakeup pipe, a pipe: whoever raises a flag rings for those who say in their ledgers that they
sleep.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from phalanx.errors import BackendUnavailableError
from phalanx.transport.shm.segments import (
    Arena,
    Segment,
    keeps_order,
    make_fence,
    make_order,
    open_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.wire.control import Address


class LocalPeer:
    """Another rank of this host."""

    def __init__(self, rank: int, process: int, memory: int, wakeup: int) -> None:
        self.rank = rank
        self.is_here = process == os.getpid()  # a thread of this process
        self.directory = PeerDirectory(process, memory)
        self._bell = open_of(process, wakeup, os.O_WRONLY | os.O_NONBLOCK)

    def wake(self) -> None:
        """Ring, if it sleeps."""
        if self.directory.words[ASLEEP]:
            self.ring()

    def ring(self) -> None:
        """Wake it."""
        with suppress(BlockingIOError, BrokenPipeError):  # it rings already; it is gone
            os.write(self._bell, b"!")

    def close(self) -> None:
        """Ring no more."""
        os.close(self._bell)


class Fillable(Protocol):
    """What may be full, until a local peer has taken something."""

    @property
    def is_full(self) -> bool:
        """Whether it is."""
        ...


class HostDomain:
    """One rank's. All methods are called with the engine's lock held."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.weak_order = not keeps_order()
        self.fence = make_fence()
        rings = world_size * RING_SIZE
        self.rank = rank
        self.directory = Directory(rings)
        self.arena = Arena(self.directory.segment, SIZE + rings, self.directory.add_segment)
        self.local_peers: dict[int, LocalPeer] = {}
        self.stalled: dict[Fillable, Callable[[], None]] = {}  # and what to do when not full
        self.wakeup, self._rope = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.begins_to_wait: Callable[[], None] = _nothing  # called when something is to come
        self._retired: list[Callable[[], bool]] = []

    @property
    def memory(self) -> int:
        """For the others: the number of the directory's file in this process."""
        return self.directory.segment.fd

    @property
    def wakeup_end(self) -> int:
        """For the others: the number of the file that rings this rank's wakeup pipe."""
        return self._rope

    def add_peer(self, rank: int, process: int, memory: int, wakeup: int) -> None:
        """Another rank of this host. Raises OSError if its memory cannot be had."""
        self.local_peers[rank] = LocalPeer(rank, process, memory, wakeup)

    def retire(self, give_back: Callable[[], bool]) -> None:
        """A group was closed. `give_back` takes back its memory, and says whether it could yet."""
        self._retired.append(give_back)

    def clear_away(self) -> None:
        """Take back the memory of groups that every member has closed."""
        self._retired = [give_back for give_back in self._retired if not give_back()]

    # Waiting --------------------------------------------------------------------------------

    def stall(self, ring: Fillable, go_on: Callable[[], None]) -> None:
        """A ring buffer is full: when it is not, go on."""
        self.stalled[ring] = go_on
        self.begins_to_wait()

    def resume_stalled(self) -> None:
        """See which ring buffers have room again, and go on with what goes through them."""
        for full, go_on in list(self.stalled.items()):
            if not full.is_full:
                del self.stalled[full]
                go_on()

    def park(self) -> None:
        """Say that this rank sleeps. Its caller then looks again, for flags raised meanwhile.

        Who raises a flag looks here afterwards. With a fence on both sides, at least one of the two
        sees what the other has written.
        """
        self.directory.words[ASLEEP] = 1
        self.fence()

    @property
    def is_parked(self) -> bool:
        """Whether this rank has said that it sleeps."""
        return self.directory.words[ASLEEP] != 0

    def unpark(self) -> None:
        """This rank is awake: it looks for itself."""
        self.directory.words[ASLEEP] = 0

    def on_wakeup(self, readable: bool, writable: bool) -> None:
        """The wakeup pipe was rung (from the reactor)."""
        with suppress(BlockingIOError):
            while os.read(self.wakeup, 4096):
                pass

    def close(self) -> None:
        """Nobody can share anything with this rank any more."""
        for local_peer in self.local_peers.values():
            local_peer.close()
        self.stalled.clear()
        self.arena.close()
        os.close(self.wakeup)
        os.close(self._rope)


def _nothing() -> None:
    pass


# ------------------------------------------------------------------------------
# The directory: where one rank writes down, for the others of its host, what memory it shows them.
#
# It lies at the beginning of a rank's first segment, which all local peers attach when they meet,
# and has a fixed form; only its owner writes in it:
#
#   word    0          1 while this rank is parked, and wants a byte in its wakeup pipe
#           1          how often a control block was entered, or taken out
#           2          how many entries for control blocks have been used
#           8 ...      segments: number of the file, size
#           ...        control blocks: group, segment + 1 (0: nothing here), offset
#
# What is published is written before what says that it is there (fence.py).

ASLEEP, EDITION, USED = 0, 1, 2
SEGMENTS, WINDOWS = 1024, 4096  # entries at most; a directory has room for them
_SEGMENT, _WINDOW = 2, 3  # words an entry
_FIRST_SEGMENT = 8
_FIRST_WINDOW = _FIRST_SEGMENT + SEGMENTS * _SEGMENT
SIZE = 128 << 10  # bytes of a directory

# Behind it come the ring buffers to every rank of the job (queue.py), each at a fixed place.
PIECE = 512 << 10  # bytes
PIECES = 4
RING_HEAD = 4096  # bytes; word 0: how many pieces of the ring buffer back this rank has taken
RING_SIZE = RING_HEAD + PIECES * PIECE

# Bytes behind it and the ring buffers, which cost nothing until they are written: control blocks of
# a hundred groups and their staging memory, so that they are found when this rank has ended.
ROOM = 1 << 30


class Directory:
    """This rank's own, at the beginning of a segment; behind it come `rings` bytes for these."""

    def __init__(self, rings: int = 0) -> None:
        self.segment = Segment.create(SIZE + rings + ROOM)
        self.words = self.segment.words
        self._entries: dict[int, int] = {}  # group -> its entry's first word
        self._order = make_order()

    def add_segment(self, number: int, segment: Segment) -> None:
        """Others may attach it from now on."""
        if number >= SEGMENTS:
            raise BackendUnavailableError(
                f"this rank has {SEGMENTS} pieces of shared memory, and cannot have more: free "
                "tensors of backend.empty(), or make fewer, larger ones"
            )
        entry = _FIRST_SEGMENT + number * _SEGMENT
        self.words[entry], self.words[entry + 1] = segment.fd, segment.size
        self._order()  # before a tensor in it is shown

    def add_control_block(self, group: int, segment: int, offset: int) -> None:
        """Others may look through it from now on."""
        words = self.words
        taken = set(self._entries.values())
        places = range(_FIRST_WINDOW, _FIRST_WINDOW + WINDOWS * _WINDOW, _WINDOW)
        entry = next((place for place in places if place not in taken), None)
        if entry is None:
            raise BackendUnavailableError(
                f"this rank has {WINDOWS} groups with shared memory: close() those that are not "
                "needed any more"
            )
        self._entries[group] = entry
        words[entry], words[entry + 2] = group, offset
        words[entry + 1] = segment + 1
        words[USED] = max(words[USED], (entry - _FIRST_WINDOW) // _WINDOW + 1)
        self._order()
        words[EDITION] += 1

    def remove_control_block(self, group: int) -> None:
        """Nobody looks through it any more."""
        self.words[self._entries.pop(group) + 1] = 0
        self._order()
        self.words[EDITION] += 1


class PeerDirectory:
    """Another rank's, to be read."""

    def __init__(self, process: int, fd: int) -> None:
        self._process = process
        first = Segment.attach(process, fd)
        self.words = first.words
        self._segments = {0: first}
        self._windows: dict[int, tuple[int, int]] = {}
        self._edition = 0
        self._order = make_order()

    def segment(self, number: int) -> Segment:
        """One of its segments. Raises OSError if it cannot be attached."""
        segment = self._segments.get(number)
        if segment is None:
            entry = _FIRST_SEGMENT + number * _SEGMENT
            segment = Segment.attach(self._process, self.words[entry])
            if segment.size != self.words[entry + 1]:
                raise FileNotFoundError(f"segment {number} of process {self._process} is gone")
            self._segments[number] = segment
        return segment

    def control(self, group: int) -> tuple[int, int] | None:
        """Segment and offset of its control block for a group, if it has one by now."""
        while self.words[EDITION] != self._edition:
            self._edition = self.words[EDITION]
            self._order()
            self._windows = dict(self._entries())
        return self._windows.get(group)

    def _entries(self) -> Iterator[tuple[int, tuple[int, int]]]:
        words = self.words
        for number in range(words[USED]):
            entry = _FIRST_WINDOW + number * _WINDOW
            segment = words[entry + 1]  # once: its owner may take it out between two looks
            if segment:
                yield words[entry], (segment - 1, words[entry + 2])


# ------------------------------------------------------------------------------
# How ranks that have met come to share memory.
#
# Everyone has said in the rendezvous where its directory is. Each rank attaches those of its host,
# and says how that went; nobody goes on before all have said so. So either all have what they need,
# or all know who has not, and why.

log = logging.getLogger("phalanx")


class Sharing(enum.Enum):
    """Which ranks have memory in common."""

    NOTHING = "none"
    HOSTS = "those of each host"
    ALL = "all, which have to be on one host"

    @property
    def shares(self) -> bool:
        """Whether any do."""
        return self is not Sharing.NOTHING

    def relaxed(self) -> Sharing:
        """The same, for ranks that need not be on one host."""
        return Sharing.HOSTS if self is Sharing.ALL else self

    def offer(self, rank: int, world_size: int) -> tuple[HostDomain | None, str]:
        """What this rank shows to others; or None, and why it cannot.

        It meets the others all the same, so that they hear of it, too.
        """
        if not self.shares:
            return None, ""
        try:
            return HostDomain(rank, world_size), ""
        except (OSError, AttributeError) as error:  # of a system that has no memfd_create
            return None, str(error)

    def attach(
        self, domain: HostDomain | None, why_not: str, rank: int, addresses: list[Address]
    ) -> str:
        """Attach the memory of the ranks of this one's host; what keeps it from that, or ""."""
        if domain is None:
            return f"it has no memory to share ({why_not}): that needs Linux (memfd, /proc)"
        here = addresses[rank].host_id
        for peer, address in enumerate(addresses):
            if peer == rank:
                continue
            if address.host_id != here:
                if self is Sharing.ALL:
                    return f"rank {peer} is on another host"
                continue
            if address.memory < 0:
                continue  # it has none, and says so itself
            try:
                domain.add_peer(peer, address.process, address.memory, address.wakeup)
            except OSError as error:
                return (
                    f"the memory of rank {peer} (process {address.process}) cannot be attached: "
                    f"{error.strerror or error} (this is user {os.getuid()}; ranks of one host "
                    "have to be processes of one user, who see each other in /proc)"
                )
        return ""


def check(rank: int, problems: Mapping[int, str], *, fall_back: bool) -> bool:
    """Whether every rank has attached what it should have.

    If not, raises `BackendUnavailableError`; or, with `fall_back`, rank 0 says so in its log.
    """
    for blamed, problem in sorted(problems.items()):
        if not problem:
            continue
        what = f"the ranks do not share memory: rank {blamed} says: {problem}"
        if fall_back:
            log.log(logging.WARNING if rank == 0 else logging.DEBUG, "%s; all goes over TCP", what)
            return False
        raise BackendUnavailableError(
            f"rank {rank}: {what}; use backend='hybrid' for several hosts, 'tcp' where processes "
            "may not see each other",
            rank=rank,
            peer=None if blamed == rank else blamed,
        )
    return True
