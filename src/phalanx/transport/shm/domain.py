"""The host domain: what the ranks of one host share, as one of them sees it.

    arena            the memory that this rank shows to the others
    directory        where that memory is, for them to read
    local peers      the other ranks of the host: their directories, and their wakeup pipes
    ring buffers     large messages to each of them                        (queue.py)
    control blocks   for each group, what its members show each other      (control.py)

A rank that waits for a flag spins for a short while, and then parks: it sets a word in its
directory and sleeps until its wakeup pipe is readable. A rank that raises a flag writes a byte to
the pipe of each parked peer.
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
        self._wakeup = open_of(process, wakeup, os.O_WRONLY | os.O_NONBLOCK)

    def wake(self) -> None:
        """Wake it, if it is parked."""
        if self.directory.words[ASLEEP]:
            self.wake_now()

    def wake_now(self) -> None:
        """Wake it, parked or not."""
        with suppress(
            BlockingIOError, BrokenPipeError
        ):  # the pipe is full already; the process is gone
            os.write(self._wakeup, b"!")

    def close(self) -> None:
        """Close its wakeup pipe here."""
        os.close(self._wakeup)


class Fillable(Protocol):
    """A buffer that may be full until a local peer has read from it."""

    @property
    def is_full(self) -> bool:
        """Whether it is."""
        ...


class HostDomain:
    """One rank's view of it. All methods are called with the engine's lock held."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.weak_order = not keeps_order()
        self.fence = make_fence()
        rings = world_size * RING_SIZE
        self.rank = rank
        self.directory = Directory(rings)
        self.arena = Arena(self.directory.segment, SIZE + rings, self.directory.add_segment)
        self.local_peers: dict[int, LocalPeer] = {}
        self.stalled: dict[Fillable, Callable[[], None]] = {}  # and what to do when not full
        self.wakeup, self._wakeup_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.begins_to_wait: Callable[[], None] = (
            _nothing  # called when it begins to wait for a peer
        )
        self._retired: list[Callable[[], bool]] = []

    @property
    def memory(self) -> int:
        """The file descriptor of the directory in this process, for the others to open."""
        return self.directory.segment.fd

    @property
    def wakeup_end(self) -> int:
        """The file descriptor of the wakeup pipe's writing end, for the others to open."""
        return self._wakeup_end

    def add_peer(self, rank: int, process: int, memory: int, wakeup: int) -> None:
        """Add another rank of this host. Raises OSError if its memory cannot be attached."""
        self.local_peers[rank] = LocalPeer(rank, process, memory, wakeup)

    def retire(self, give_back: Callable[[], bool]) -> None:
        """A group was closed. `give_back` takes back its memory, and says whether it could yet."""
        self._retired.append(give_back)

    def clear_away(self) -> None:
        """Take back the memory of groups that every member has closed."""
        self._retired = [give_back for give_back in self._retired if not give_back()]

    # Waiting --------------------------------------------------------------------------------

    def stall(self, ring: Fillable, go_on: Callable[[], None]) -> None:
        """A ring buffer is full: call `go_on` when it is not."""
        self.stalled[ring] = go_on
        self.begins_to_wait()

    def resume_stalled(self) -> None:
        """Go on with the ring buffers that have room again."""
        for full, go_on in list(self.stalled.items()):
            if not full.is_full:
                del self.stalled[full]
                go_on()

    def park(self) -> None:
        """Say that this rank sleeps. The caller then checks the flags once more.

        A peer that raises a flag reads this word afterwards. With a fence on both sides, at least
        one of the two sees what the other has written.
        """
        self.directory.words[ASLEEP] = 1
        self.fence()

    @property
    def is_parked(self) -> bool:
        """Whether this rank has said that it sleeps."""
        return self.directory.words[ASLEEP] != 0

    def unpark(self) -> None:
        """Say that this rank is awake: it checks flags itself."""
        self.directory.words[ASLEEP] = 0

    def on_wakeup(self, readable: bool, writable: bool) -> None:
        """The wakeup pipe is readable (from the reactor): empty it."""
        with suppress(BlockingIOError):
            while os.read(self.wakeup, 4096):
                pass

    def close(self) -> None:
        """Close this rank's memory and pipes: nobody can attach them from now on."""
        for local_peer in self.local_peers.values():
            local_peer.close()
        self.stalled.clear()
        self.arena.close()
        os.close(self.wakeup)
        os.close(self._wakeup_end)


def _nothing() -> None:
    pass


# ------------------------------------------------------------------------------
# The directory: where one rank publishes which memory it shows to the others of its host.
#
# It lies at the beginning of a rank's first segment, which all local peers attach in the
# rendezvous, and has a fixed layout; only its owner writes in it:
#
#   word    0          1 while this rank is parked, and wants a byte in its wakeup pipe
#           1          how often a control block was added or removed
#           2          how many entries for control blocks have been used
#           8 ...      segments: file descriptor, size
#           ...        control blocks: group, segment + 1 (0: nothing here), offset
#
# An entry is written before the word that publishes it (see the fences in segments.py).

ASLEEP, EDITION, USED = 0, 1, 2
SEGMENTS, CONTROL_BLOCKS = 1024, 4096  # entries at most; a directory has room for them
_SEGMENT, _CONTROL_BLOCK = 2, 3  # words an entry
_FIRST_SEGMENT = 8
_FIRST_CONTROL_BLOCK = _FIRST_SEGMENT + SEGMENTS * _SEGMENT
SIZE = 128 << 10  # bytes of a directory

# Behind it come the ring buffers to every rank of the job (queue.py), each at a fixed place.
PIECE = 512 << 10  # bytes
PIECES = 4
RING_HEAD = 4096  # bytes; word 0: how many pieces of the opposite ring buffer this rank has taken
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
        """Publish a segment: others may attach it from now on."""
        if number >= SEGMENTS:
            raise BackendUnavailableError(
                f"this rank has {SEGMENTS} pieces of shared memory, and cannot have more: free "
                "tensors of backend.empty(), or make fewer, larger ones"
            )
        entry = _FIRST_SEGMENT + number * _SEGMENT
        self.words[entry], self.words[entry + 1] = segment.fd, segment.size
        self._order()  # before a tensor in it is shown

    def add_control_block(self, group: int, segment: int, offset: int) -> None:
        """Publish a control block: members may read it from now on."""
        words = self.words
        taken = set(self._entries.values())
        places = range(
            _FIRST_CONTROL_BLOCK,
            _FIRST_CONTROL_BLOCK + CONTROL_BLOCKS * _CONTROL_BLOCK,
            _CONTROL_BLOCK,
        )
        entry = next((place for place in places if place not in taken), None)
        if entry is None:
            raise BackendUnavailableError(
                f"this rank has {CONTROL_BLOCKS} groups with shared memory: close() those that are "
                "not needed any more"
            )
        self._entries[group] = entry
        words[entry], words[entry + 2] = group, offset
        words[entry + 1] = segment + 1
        words[USED] = max(words[USED], (entry - _FIRST_CONTROL_BLOCK) // _CONTROL_BLOCK + 1)
        self._order()
        words[EDITION] += 1

    def remove_control_block(self, group: int) -> None:
        """Remove a control block that nobody reads any more."""
        self.words[self._entries.pop(group) + 1] = 0
        self._order()
        self.words[EDITION] += 1


class PeerDirectory:
    """The directory of another rank, to be read."""

    def __init__(self, process: int, fd: int) -> None:
        self._process = process
        first = Segment.attach(process, fd)
        self.words = first.words
        self._segments = {0: first}
        self._control_blocks: dict[int, tuple[int, int]] = {}
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
            self._control_blocks = dict(self._entries())
        return self._control_blocks.get(group)

    def _entries(self) -> Iterator[tuple[int, tuple[int, int]]]:
        words = self.words
        for number in range(words[USED]):
            entry = _FIRST_CONTROL_BLOCK + number * _CONTROL_BLOCK
            segment = words[entry + 1]  # once: its owner may take it out between two looks
            if segment:
                yield words[entry], (segment - 1, words[entry + 2])


# ------------------------------------------------------------------------------
# How the ranks of a host attach each other's memory, in the rendezvous.
#
# Each rank tells the others where its directory is, attaches the directories of its host, and then
# reports whether it could; nobody goes on before all have reported. So either all have what they
# need, or all know which rank has not, and why.

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
        """This rank's domain; or None, and why it has none.

        It takes part in the rendezvous all the same, so that the others are told why.
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
        """Attach the memory of the ranks of this host; returns what went wrong, or ""."""
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

    If not, raises `BackendUnavailableError`; or, with `fall_back`, rank 0 logs a warning.
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
