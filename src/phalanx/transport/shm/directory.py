"""The directory: one rank's list of the memory that it shows to the others of its host.

It lies at the beginning of a rank's first segment, which all local peers attach in the
rendezvous, and has a fixed layout; only its owner writes in it:

  word    0          1 while this rank is parked, and wants a byte in its wakeup pipe
          1          number of times that a control block was added or removed
          2          number of entries for control blocks that have been used
          3, 4       address of the directory in its process's memory; a random number
          5          1 if this rank can read the ordinary memory of all its local peers, and gains
          6, 7       the job's number; the descriptor of its wakeup pipe's writing end
          8 ...      segments: file descriptor, size
          ...        control blocks: group, segment + 1 (0: nothing here), offset

An entry is written before the word that publishes it (see the fences below).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress

from phalanx.core.shared_group import UnreadableError
from phalanx.errors import BackendUnavailableError
from phalanx.transport.shm.cross_memory import ProcessMemory
from phalanx.transport.shm.segments import PIPE, Segment, open_of

ASLEEP, EDITION, USED, HERE, PROOF, READS, JOB, WAKEUP = range(8)
SEGMENTS, CONTROL_BLOCKS = 1024, 4096  # entries at most; a directory has room for them
_SEGMENT_ENTRIES = range(8, 8 + 2 * SEGMENTS, 2)  # the first words of entries
_FIRST = _SEGMENT_ENTRIES.stop
_CONTROL_BLOCK_ENTRIES = range(_FIRST, _FIRST + 3 * CONTROL_BLOCKS, 3)
SIZE = 128 << 10  # bytes of a directory

# Bytes behind it and the ring buffers, which cost nothing until they are written: control blocks of
# a hundred groups and their staging memory, so that they are found when this rank has ended.
ROOM = 1 << 30


class Directory:
    """This rank's directory, at the beginning of a segment; `rings` bytes for rings follow."""

    def __init__(self, rings: int = 0) -> None:
        self.segment = Segment.create(SIZE + rings + ROOM)
        self.words = self.segment.words
        self.words[HERE] = self.segment.start
        self.words[PROOF] = int.from_bytes(os.urandom(8), "little")
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


class LocalPeer(dict[int, Segment]):
    """Another rank of this host: its segments by number, attached when they are looked up.

    Looking one up raises OSError if it cannot be attached.

    words   of its directory, to be read
    """

    def __init__(self, rank: int, process: int, memory: int, wakeup: int, mine: Directory) -> None:
        self.rank = rank
        self.is_here = process == os.getpid()  # a thread of this process
        self[0] = Segment.attach(process, memory, mine.segment.size)
        self.words = self[0].words
        # Else it names memory of another job of this user, or another pipe of that process.
        if (self.words[JOB], self.words[WAKEUP]) != (mine.words[JOB], wakeup):
            raise PermissionError(errno.EPERM, f"process {process} is no such rank of this job")
        self._memory = ProcessMemory(process)
        self._process = process
        self._wakeup = open_of(process, wakeup, PIPE)
        self._control_blocks: dict[int, tuple[int, int]] = {}
        self._edition = 0
        self._fence = make_fence()

    def __missing__(self, number: int) -> Segment:
        entry = _SEGMENT_ENTRIES[number]
        segment = Segment.attach(self._process, self.words[entry], self.words[entry + 1])
        self[number] = segment
        return segment

    def is_readable(self) -> bool:
        """Return whether the ordinary memory of its process can be read here."""
        found = ctypes.c_uint64()
        try:
            self._memory.read(ctypes.addressof(found), self.words[HERE] + 8 * PROOF, 8)
        except OSError:
            return False
        return found.value == self.words[PROOF]

    def read(self, into: int, address: int, length: int) -> None:
        """Read its ordinary memory; blocks meanwhile. Raises `UnreadableError`."""
        try:
            self._memory.read(into, address, length)
        except OSError as error:
            raise UnreadableError(self.rank, error) from error

    def control(self, group: int) -> tuple[int, int] | None:
        """Return segment and offset of its control block for a group, if it has one by now."""
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

    def wake(self) -> None:
        """Wake it: it is parked."""
        with suppress(BlockingIOError, BrokenPipeError):  # the pipe is full; nobody reads it
            os.write(self._wakeup, b"!")

    def close(self) -> None:
        """Close its wakeup pipe here."""
        os.close(self._wakeup)


# ------------------------------------------------------------------------------
# Memory fences: the order in which one processor sees another one's writes.


# Whether this processor shows stores to others in another order than that in which they were made.
# x86-64 does not (total store order), nor does it reorder loads: data, then a flag; the flag, then
# data, needs nothing in between. Only a load may pass an earlier store to another place.
WEAK_ORDER = platform.machine() not in ("x86_64", "AMD64")


def make_fence() -> Callable[[], None]:
    """Make a full memory fence: writes before it are seen before any read after it.

    Taking a lock is one: on x86-64 it is an instruction that locks the bus, behind which no load
    passes a store. Elsewhere taking a lock only holds back later accesses, and releasing it only
    earlier ones. So it takes two locks, one after the other: nothing moves either way between the
    release of the first and the acquisition of the second (Arm's load-acquire is not reordered with
    an earlier store-release).
    """
    lock, second = threading.Lock(), threading.Lock()

    def fence() -> None:
        with lock:
            pass

    def fence_of_two() -> None:
        with lock:
            pass
        with second:
            pass

    return fence_of_two if WEAK_ORDER else fence
