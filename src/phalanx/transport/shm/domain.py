"""The host domain: the shared memory of one host's ranks, as one of them sees it.

    arena            the memory that this rank shows to the others
    directory        the place of that memory, for them to read (directory.py)
    local peers      the other ranks of the host: their directories, and their wakeup pipes
    ring buffers     large messages to each of them (ring.py)
    control blocks   for each group, the memory that its members show each other (control.py)

A rank that waits for a flag spins for a short while, and then parks: it sets a word in its
directory and sleeps until its wakeup pipe is readable. A rank that raises a flag writes a byte to
the pipe of each parked peer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from phalanx.core.call import Members
from phalanx.core.steps import Source
from phalanx.transport.shm.control import ControlBlock
from phalanx.transport.shm.cross_memory import (
    ProcessMemory,
    cma_setting,
    let_others_read,
    reading_pays,
)
from phalanx.transport.shm.directory import (
    ASLEEP,
    JOB,
    READS,
    SIZE,
    WAKEUP,
    Directory,
    LocalPeer,
    make_fence,
)
from phalanx.transport.shm.ring import RING_SIZE, RingBuffer
from phalanx.transport.shm.segments import Arena, Piece
from phalanx.wire.control import Address


class HostDomain:
    """One rank's view of its host. All methods are called with the engine's lock held.

    memory, wakeup_end   file descriptors in this process, for the others to open: the directory's
                         memory, and the writing end of the wakeup pipe
    stalled              ring buffers that were full, and the functions to call when they are not
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
        self.wakeup, self.wakeup_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.directory.words[WAKEUP] = self.wakeup_end
        self.directory.words[JOB] = int.from_bytes(job, "little")

    def add_peer(self, rank: int, process: int, memory: int, wakeup: int) -> None:
        """Add another rank of this host. Raises OSError if its memory cannot be attached."""
        self.local_peers[rank] = LocalPeer(rank, process, memory, wakeup, self.directory)

    def attach(self, addresses: list[Address], *, one_host: bool) -> str:
        """Attach the memory of the ranks of this host. Return the problem, or "".

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
        """Try to read the ordinary memory of all local peers, and publish the result."""
        can = all(peer.is_readable() for peer in self.local_peers.values())
        self.directory.words[READS] = int(can)

    def can_read(self, address: int) -> bool:
        """Return whether this process can be read there as peers would."""
        byte = ctypes.c_char()
        try:
            self._memory.read(ctypes.addressof(byte), address, 1)
        except OSError:
            return False
        return True

    def ring(self, peer: int) -> RingBuffer | None:
        """Return the ring buffers to and from a rank of this host, if its memory is attached."""
        local_peer = self.local_peers.get(peer)
        return RingBuffer(self, local_peer) if local_peer is not None else None

    def shared(self, group: Members) -> ControlBlock | None:
        """Return the shared memory of a group's members on this host, if there are others."""
        here = group.here
        ranks = tuple(rank for rank in group.ranks if rank == here or rank in self.local_peers)
        if len(ranks) == 1:
            return None
        self.closed = [give_back for give_back in self.closed if not give_back()]
        return ControlBlock(self, group.id, ranks, here)

    def source(self) -> Source:
        """Return a source of memory that ranks of this host have in common."""
        return Piece()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in memory that this rank shows to the others."""
        return self.arena.empty(shape, dtype)

    def detach(self) -> None:
        """Keep a forked child's writes to itself."""
        for segment in self.arena.segments:
            segment.detach()

    # Waiting --------------------------------------------------------------------------------

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
        """True if this rank has said that it sleeps."""
        return self.directory.words[ASLEEP] != 0

    def unpark(self) -> None:
        """Say that this rank is awake: it checks flags itself."""
        self.directory.words[ASLEEP] = 0

    def on_wakeup(self, readable: bool, writable: bool) -> None:
        """Empty the wakeup pipe, which is readable (from the reactor)."""
        with suppress(BlockingIOError):
            while os.read(self.wakeup, 4096):
                pass

    def close(self) -> None:
        """Close this rank's memory and pipes: nobody can attach them from now on."""
        for local_peer in self.local_peers.values():
            local_peer.close()
        self.stalled.clear()
        self.closed.clear()
        self.arena.close()
        for file in (self.wakeup, self.wakeup_end):
            os.close(file)
