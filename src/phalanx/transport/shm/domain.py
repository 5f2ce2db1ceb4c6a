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

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.errors import BackendUnavailableError
from phalanx.transport.shm.segments import Arena, Segment, make_fence, open_of

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
            with suppress(BlockingIOError, BrokenPipeError):  # the pipe is full; nobody reads it
                os.write(self._wakeup, b"!")

    def close(self) -> None:
        """Close its wakeup pipe here."""
        os.close(self._wakeup)


class HostDomain:
    """One rank's view of it. All methods are called with the engine's lock held.

    memory, wakeup_end   file descriptors in this process, for the others to open: the directory's
                         memory, and the writing end of the wakeup pipe
    stalled              for each ring buffer that was full, whether it still is, and what to do
                         when it is not
    begins_to_wait       called when a ring buffer begins to wait for a peer
    closed               groups that were closed: each takes back its memory, and says whether it
                         could yet
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.fence = make_fence()
        rings = world_size * RING_SIZE
        self.rank = rank
        self.directory = Directory(rings)
        self.arena = Arena(self.directory.segment, SIZE + rings, self.directory.add_segment)
        self.local_peers: dict[int, LocalPeer] = {}
        self.stalled: dict[Callable[[], bool], Callable[[], None]] = {}
        self.begins_to_wait: Callable[[], None] = lambda: None
        self.closed: list[Callable[[], bool]] = []
        self.memory = self.directory.segment.fd
        self.wakeup, self.wakeup_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def add_peer(self, rank: int, process: int, memory: int, wakeup: int) -> None:
        """Add another rank of this host. Raises OSError if its memory cannot be attached."""
        self.local_peers[rank] = LocalPeer(rank, process, memory, wakeup)

    def attach(self, addresses: list[Address], *, one_host: bool) -> str:
        """Attach the memory of the ranks of this host; returns what went wrong, or "".

        one_host   whether all ranks have to be on it
        """
        for peer, address in enumerate(addresses):
            if peer == self.rank:
                continue
            if address.host_id != addresses[self.rank].host_id:
                if one_host:
                    return f"rank {peer} is on another host"
                continue
            if address.memory < 0:
                continue  # it has none, and says so itself
            try:
                self.add_peer(peer, address.process, address.memory, address.wakeup)
            except OSError as error:
                return (
                    f"the memory of rank {peer} (process {address.process}) cannot be attached: "
                    f"{error.strerror or error} (this is user {os.getuid()}; ranks of one host "
                    "have to be processes of one user, who see each other in /proc)"
                )
        return ""

    # Waiting --------------------------------------------------------------------------------

    def resume_stalled(self) -> None:
        """Go on with the ring buffers that have room again."""
        for is_full, go_on in list(self.stalled.items()):
            if not is_full():
                del self.stalled[is_full]
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
        os.close(self.wakeup_end)


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
_SEGMENT_ENTRIES = range(8, 8 + 2 * SEGMENTS, 2)  # the first words of entries
_FIRST = _SEGMENT_ENTRIES.stop
_CONTROL_BLOCK_ENTRIES = range(_FIRST, _FIRST + 3 * CONTROL_BLOCKS, 3)
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
        self._fence = make_fence()

    def add_segment(self, number: int, segment: Segment) -> None:
        """Publish a segment: others may attach it from now on."""
        if number >= SEGMENTS:
            raise BackendUnavailableError(
                f"this rank has {SEGMENTS} pieces of shared memory, and cannot have more: free "
                "tensors of backend.empty(), or make fewer, larger ones"
            )
        entry = _SEGMENT_ENTRIES[number]
        self.words[entry], self.words[entry + 1] = segment.fd, segment.size
        self._fence()  # before a tensor in it is shown

    def add_control_block(self, group: int, segment: int, offset: int) -> None:
        """Publish a control block: members may read it from now on."""
        words = self.words
        taken = set(self._entries.values())
        entry = next((entry for entry in _CONTROL_BLOCK_ENTRIES if entry not in taken), None)
        if entry is None:
            raise BackendUnavailableError(
                f"this rank has {CONTROL_BLOCKS} groups with shared memory: close() those that are "
                "not needed any more"
            )
        self._entries[group] = entry
        words[entry], words[entry + 2] = group, offset
        words[entry + 1] = segment + 1
        words[USED] = max(words[USED], _CONTROL_BLOCK_ENTRIES.index(entry) + 1)
        self._fence()
        words[EDITION] += 1

    def remove_control_block(self, group: int) -> None:
        """Remove a control block that nobody reads any more."""
        self.words[self._entries.pop(group) + 1] = 0
        self._fence()
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
        self._fence = make_fence()

    def segment(self, number: int) -> Segment:
        """One of its segments. Raises OSError if it cannot be attached."""
        segment = self._segments.get(number)
        if segment is None:
            entry = _SEGMENT_ENTRIES[number]
            segment = Segment.attach(self._process, self.words[entry])
            if segment.size != self.words[entry + 1]:
                raise FileNotFoundError(f"segment {number} of process {self._process} is gone")
            self._segments[number] = segment
        return segment

    def control(self, group: int) -> tuple[int, int] | None:
        """Segment and offset of its control block for a group, if it has one by now."""
        while self.words[EDITION] != self._edition:
            self._edition = self.words[EDITION]
            self._fence()
            words, found = self.words, {}
            for entry in _CONTROL_BLOCK_ENTRIES[: words[USED]]:
                segment = words[entry + 1]  # once: its owner may take it out between two looks
                if segment:
                    found[words[entry]] = (segment - 1, words[entry + 2])
            self._control_blocks = found
        return self._control_blocks.get(group)
