"""A peer slot: one member's control block, as another member sees it.

words          of 64 bits, in cache lines of their own
flag           number of the group's epochs at which it has arrived
staged         segment + 1 and offset of its staging memory, once it has some
closed         1 when it has closed the group
broken         the epoch at which it had arrived when a collective failed there; 0: none has
entries        used in turn: the rolling hash up to the collective; segment + 1 (0: staged)
               and offset of its input, or `ORDINARY` + 1 and its address in its process;
               the same of its result
slots          for small collectives: two used in turn, then one for each entry
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.transport.shm.directory import LocalPeer
from phalanx.transport.shm.segments import Segment
from phalanx.wire.memory import tensor_at

FLAG, STAGED, CLOSED, BROKEN, ENTRIES = 0, 8, 16, 24, 32  # words
ENTRY = 8  # words of an entry
AHEAD = 16  # entries
ORDINARY = 1 << 32  # for a segment: ordinary memory, which is read by cross-memory attach
GIVEN = tuple(ENTRIES + turn * ENTRY + 1 for turn in range(AHEAD))  # of each entry
RESULT = tuple(ENTRIES + turn * ENTRY + 3 for turn in range(AHEAD))
SLOTS = 4096  # byte at which they begin
SLOT = 64 << 10  # bytes of a slot
SIZE = SLOTS + (2 + AHEAD) * SLOT


class PeerSlot:
    """One member's control block, as this rank sees it."""

    def __init__(
        self, rank: int, segments: list[Segment] | LocalPeer, number: int, offset: int
    ) -> None:
        self.rank = rank  # of the whole job
        self.peer = segments if isinstance(segments, LocalPeer) else None  # whose slot it is
        self.segments = segments
        self._segment = segment = segments[number]
        self.words = segment.words[offset // 8 : (offset + SLOTS) // 8]
        self._slots = offset + SLOTS

    def slot(self, number: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return its memory for a small tensor."""
        return tensor_at(self.slot_address(number), count, dtype, keeping=self._segment)

    def slot_address(self, number: int) -> int:
        """Return the address of that memory in this process."""
        return self._segment.start + self._slots + number * SLOT

    @property
    def stage_address(self) -> int:
        """Return the address of its staging memory in this process."""
        return self.segments[self.words[STAGED] - 1].start + self.words[STAGED + 1]


def peer_slot(peer: LocalPeer, group: int) -> PeerSlot | None:
    """Return a local peer's control block for a group, once the peer has made the group."""
    found = peer.control(group)
    try:
        return PeerSlot(peer.rank, peer, *found) if found is not None else None
    except (FileNotFoundError, ProcessLookupError):  # its process is gone, or has closed it
        return None
