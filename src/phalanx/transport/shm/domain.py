"""The host domain: what the ranks of one host share, as one of them sees it.

    arena            the memory that this rank shows to the others
    directory        where that memory is, for them to read
    local peers      the other ranks of the host: their directories, and their wakeup pipes
    ring buffers     large messages to each of them
    control blocks   for each group, what its members show each other (control.py)

A rank that waits for a flag spins for a short while, and then parks: it sets a word in its
directory and sleeps until its wakeup pipe is readable. A rank that raises a flag writes a byte to
the pipe of each parked peer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from phalanx.core.posted import PostedSend
from phalanx.errors import BackendUnavailableError
from phalanx.transport.shm.cross_memory import (
    ProcessMemory,
    cma_setting,
    let_others_read,
    reading_pays,
)
from phalanx.transport.shm.segments import PIPE, Arena, Segment, open_of
from phalanx.wire.control import Address
from phalanx.wire.frame import Channel, FrameError, Header, Kind, pack_header


class HostDomain:
    """One rank's view of it. All methods are called with the engine's lock held.

    memory, wakeup_end   file descriptors in this process, for the others to open: the directory's
                         memory, and the writing end of the wakeup pipe
    stalled              ring buffers that were full, and what to do when they are not
    begins_to_wait       called when a ring buffer begins to wait for a peer
    closed               groups that were closed: each takes back its memory, and says whether it
                         could yet

    `job` is eight bytes that only ranks of one job have in common: no others are attached.
    """

    def __init__(self, rank: int, world_size: int, job: bytes = b"") -> None:
        self._cma = cma_setting()
        if self._cma == "allow":
            let_others_read()
        self.fence = make_fence()
        rings = world_size * RING_SIZE
        self.rank = rank
        self.directory = Directory(rings)
        self.arena = Arena(self.directory.segment, SIZE + rings, self.directory.add_segment)
        self.local_peers: dict[int, LocalPeer] = {}
        self.stalled: dict[RingBuffer, Callable[[], None]] = {}
        self.begins_to_wait: Callable[[], None] = lambda: None
        self.closed: list[Callable[[], bool]] = []
        self.memory = self.directory.segment.fd
        self._memory = ProcessMemory(os.getpid())
        self._load = _load_average()
        self.wakeup, self.wakeup_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.directory.words[WAKEUP] = self.wakeup_end
        self.directory.words[JOB] = int.from_bytes(job, "little")

    def add_peer(self, rank: int, process: int, memory: int, wakeup: int) -> None:
        """Add another rank of this host. Raises OSError if its memory cannot be attached."""
        self.local_peers[rank] = LocalPeer(rank, process, memory, wakeup, self.directory)

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
        if self.local_peers and (self._cma == "allow" or (self._cma == "auto" and reading_pays())):
            self.try_reading()
        return ""

    def try_reading(self) -> None:
        """Try to read the ordinary memory of all local peers, and say whether this rank can."""
        can = all(peer.is_readable() for peer in self.local_peers.values())
        self.directory.words[READS] = int(can)

    def can_read(self, address: int) -> bool:
        """Whether this process can be read there as peers would."""
        byte = ctypes.c_char()
        try:
            self._memory.read(ctypes.addressof(byte), address, 1)
        except OSError:
            return False
        return True

    # Waiting --------------------------------------------------------------------------------

    def running(self) -> int:
        """How many threads of this host are running or want to, at this moment; 0: not known."""
        if self._load is None:
            return 0
        return int(os.pread(self._load, 64, 0).split()[3].partition(b"/")[0])

    def resume_stalled(self) -> None:
        """Go on with the ring buffers that have room again."""
        for ring, go_on in list(self.stalled.items()):
            if not ring.is_full():
                del self.stalled[ring]
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
        for file in (self.wakeup, self.wakeup_end, self._load):
            if file is not None:
                os.close(file)


def _load_average() -> int | None:
    """The file that says how many threads are running, open; None where there is none."""
    try:
        return os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


# ------------------------------------------------------------------------------
# The directory: where one rank publishes which memory it shows to the others of its host.
#
# It lies at the beginning of a rank's first segment, which all local peers attach in the
# rendezvous, and has a fixed layout; only its owner writes in it:
#
#   word    0          1 while this rank is parked, and wants a byte in its wakeup pipe
#           1          how often a control block was added or removed
#           2          how many entries for control blocks have been used
#           3, 4       where the directory is in its process's memory; a random number
#           5          1 if this rank can read the ordinary memory of all its local peers, and gains
#           6, 7       the job's number; the descriptor of its wakeup pipe's writing end
#           8 ...      segments: file descriptor, size
#           ...        control blocks: group, segment + 1 (0: nothing here), offset
#
# An entry is written before the word that publishes it (see the fences below).

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
    """This rank's own, at the beginning of a segment; behind it come `rings` bytes for these."""

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


class UnreadableError(Exception):
    """The ordinary memory of a local peer cannot be read: why not, and whose."""

    def __init__(self, peer: LocalPeer, error: OSError) -> None:
        super().__init__(error.strerror)
        self.peer = peer
        self.is_gone = isinstance(error, ProcessLookupError)


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
        """Whether the ordinary memory of its process can be read here."""
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
            raise UnreadableError(self, error) from error

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

    def wake(self) -> None:
        """Wake it: it is parked."""
        with suppress(BlockingIOError, BrokenPipeError):  # the pipe is full; nobody reads it
            os.write(self._wakeup, b"!")

    def close(self) -> None:
        """Close its wakeup pipe here."""
        os.close(self._wakeup)


# ------------------------------------------------------------------------------
# Ring buffers: memory through which the large messages of one rank go to a local peer.
#
#     sender                                                      receiver
#     copies a piece into the ring buffer
#     says so on the connection: PIECE   -------------------->    copies it to where it belongs,
#                                                                 or combines it right from there
#     uses that part of the ring buffer again   <- a count in memory -   counts it as taken
#
# PIECE frames go over the connection, in order with all other messages, so messages never overtake
# each other. A sender waits while its ring buffer is full, as it does while its socket is. The
# contents of the ring buffer outlive the sender, since the receiver has the memory mapped.
#
# Each rank has a ring buffer to every rank of the job at a fixed place of its first segment, behind
# the directory; memory is only taken for those that are used.

LARGE = 64 << 10  # bytes of a message from which on it goes through a ring buffer
PIECE = 512 << 10  # bytes
PIECES = 4
RING_HEAD = 4096  # bytes; word 0: how many pieces of the opposite ring buffer this rank has taken
RING_SIZE = RING_HEAD + PIECES * PIECE

_PIECE = struct.Struct("<BQQQI")  # kind, fingerprint, total, offset, length


class RingBuffer:
    """One rank's, to one local peer, and the local peer's to it."""

    def __init__(self, domain: HostDomain, peer: int) -> None:
        local_peer = domain.local_peers[peer]
        mine, theirs = domain.directory.segment, local_peer[0]
        there, here = SIZE + peer * RING_SIZE, SIZE + domain.rank * RING_SIZE
        self._domain = domain
        self._peer = local_peer
        self._out = memoryview(mine.map)[there + RING_HEAD : there + RING_SIZE]
        self._in = memoryview(theirs.map)[here + RING_HEAD : here + RING_SIZE]
        self._taken_here = mine.words[there // 8 : there // 8 + 1]
        self._taken_there = theirs.words[here // 8 : here // 8 + 1]
        self._sent = self._received = 0

    def is_full(self) -> bool:
        """Whether the local peer has to read a piece before more can be sent."""
        return self._sent - self._taken_there[0] >= PIECES

    def put(self, send: PostedSend, offset: int) -> bytes | None:
        """Put a message's next piece in; the frame that says so, or None while there is no room."""
        if self.is_full():
            return None
        group, kind, number = send.work.channel
        piece = send.view[offset : offset + PIECE]
        start = self._sent % PIECES * PIECE
        self._out[start : start + len(piece)] = piece
        self._sent += 1
        if WEAK_ORDER:
            self._domain.fence()
        fingerprint = send.work.call.fingerprint
        what = _PIECE.pack(kind, fingerprint, len(send.view), offset, len(piece))
        channel = Channel(group, Kind.PIECE, number)
        return pack_header(channel, length=len(what), total=len(what)) + what

    def came(self, header: Header, payload: bytes) -> tuple[Header, memoryview]:
        """A PIECE frame has come: the header of the message's part, and its bytes in the buffer.

        Raises `FrameError` for an invalid one.
        """
        try:
            kind, fingerprint, total, offset, length = _PIECE.unpack(payload)
            channel = Channel(header.channel.group, Kind(kind), header.channel.number)
        except (struct.error, ValueError):
            raise FrameError("a piece of a message that cannot be read") from None
        if kind not in (Kind.COLLECTIVE, Kind.POINT_TO_POINT) or not (
            0 < length <= PIECE and offset + length <= total
        ):
            raise FrameError(f"a piece of {length} bytes at {offset} of a message of {total}")
        start = self._received % PIECES * PIECE
        self._received += 1
        return Header(channel, fingerprint, length, total, offset), self._in[start : start + length]

    def taken(self, count: int) -> None:
        """The oldest pieces have been read; the local peer may use their memory again."""
        self._taken_here[0] += count
        self._domain.fence()
        if self._peer.words[ASLEEP]:
            self._peer.wake()

    def when_free(self, go_on: Callable[[], None]) -> None:
        """It is full: call `go_on` when it is not."""
        self._domain.stalled[self] = go_on
        self._domain.begins_to_wait()

    def give_up(self) -> None:
        """Nothing more is to be sent."""
        self._domain.stalled.pop(self, None)


# ------------------------------------------------------------------------------
# Memory fences: in which order one processor sees what another has written.


# Whether this processor shows stores to others in another order than that in which they were made.
# x86-64 does not (total store order), nor does it reorder loads: data, then a flag; the flag, then
# data, needs nothing in between. Only a load may pass an earlier store to another place.
WEAK_ORDER = platform.machine() not in ("x86_64", "AMD64")


def make_fence() -> Callable[[], None]:
    """A full memory fence: what is written before it is seen before what is read after it.

    Taking a lock is one: on x86-64 it is an instruction that locks the bus, behind which no load
    passes a store. Elsewhere taking a lock only keeps what follows behind it, and giving it back
    what went before in front; so it takes two locks, one after the other, as between the release of
    the first and the acquisition of the second nothing moves either way (Arm's load-acquire is not
    reordered with an earlier store-release).
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
