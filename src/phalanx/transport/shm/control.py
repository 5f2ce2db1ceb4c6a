"""A control block: what one rank shows to the other members of a group, and what it sees of them.

Each member has one in its own memory, in which only it writes: a flag, what it is doing, slots for
small tensors and staging memory for others. `PeerSlot` below has the layout.

An *epoch* is a barrier: a member writes what it shows, raises its flag, and goes on when all others
have raised theirs as high. So after the nth epoch every member may read what any member has shown
before it. Nobody is more than one epoch ahead: what was shown before the epoch before last has been
read, and its memory may be written again. Hence there are two of everything.

Memory order: the data is written, then the flag; the other side reads the flag, then the data.
x86-64 keeps the order of stores, and that of loads; elsewhere a fence stands between the two on
both sides. Flags are words of 64 bits, aligned, which no processor writes in parts, each in a cache
line of its own.
"""

from __future__ import annotations

from os import sched_yield
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.call import Call, Members
from phalanx.core.steps import Step
from phalanx.transport.shm.domain import ASLEEP, WEAK_ORDER, HostDomain, LocalPeer
from phalanx.transport.shm.segments import Block, Segment, tensor_at

STAGE = 8 << 20  # bytes of staging memory, of which large tensors use all
QUICK = 50  # looks at a flag, of some 0.1 us, before the processor is offered to others
PATIENCE = 200e-6  # seconds that a rank spins before it parks


class ControlBlock:
    """One rank's, for one group, or for those of its members on this rank's host.

    ranks    those members, as ranks of the whole job; a member's place here is its number in it
    place    this rank's
    mine     this rank's own peer slot; `words` are its words
    slots    what each of them shows, this rank included; None: it has not made the group yet
    turn     0 or 1: which entry and small slot this collective uses
    phase    0 or 1: which half of the staging memory is next
    """

    def __init__(self, domain: HostDomain, group: int, ranks: tuple[int, ...], rank: int) -> None:
        self.group = group
        self.ranks = ranks
        self.place = ranks.index(rank)
        self.size = len(ranks)
        self.turn = 0
        self.phase = 0
        self._domain = domain
        self._block = domain.arena.take(SIZE)
        self._stage: Block | None = None
        number, offset, _ = self._block
        self.mine = PeerSlot(rank, domain.arena.segments, number, offset)
        self.words = self.mine.words
        self.words[:] = memoryview(bytearray(SLOTS)).cast("Q")
        self.slots: list[PeerSlot | None] = [None] * self.size
        self.slots[self.place] = self.mine
        self.others = [domain.local_peers[peer] for peer in ranks if peer != rank]
        self._flags: list[memoryview] = []  # the others' words, once all are known
        self._patience = 0.0 if any(other.is_here for other in self.others) else PATIENCE
        self.fence = domain.fence
        domain.directory.add_control_block(group, number, offset)

    @classmethod
    def of(cls, domain: HostDomain, group: Members) -> ControlBlock | None:
        """One for the members of a group that are on this host, if there are others."""
        here = group.here
        ranks = tuple(rank for rank in group.ranks if rank == here or rank in domain.local_peers)
        if len(ranks) == 1:
            return None
        domain.closed = [give_back for give_back in domain.closed if not give_back()]
        return cls(domain, group.id, ranks, here)

    def slot(self, place: int) -> PeerSlot:
        """The peer slot of a member that has arrived at an epoch of this group before."""
        slot = self.slots[place]
        assert slot is not None
        return slot

    def epoch(self, *, first: bool = False) -> ShmEpoch:
        """The step in which this rank arrives at the next epoch; see `ShmEpoch`."""
        return ShmEpoch(self, first=first)

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """The segment and offset of some memory of this rank, if others can see it."""
        for number, segment in enumerate(self._domain.arena.segments):
            offset = address - segment.start
            if offset >= 0 and offset + size <= segment.size:
                return number, offset
        return None

    def make_stage(self) -> None:
        """Allocate this rank's staging memory, once."""
        if self._stage is None:
            self._stage = self._domain.arena.take(STAGE)
            words = self.words
            words[STAGED + 1] = self._stage.offset
            words[STAGED] = self._stage.segment + 1

    # Epoch --------------------------------------------------------------------------------

    def spin(self, value: int) -> bool:
        """Spin a short while until all have arrived at an epoch; False if they have not."""
        flags = self._flags
        if not flags and not self._find_others():
            return False
        flags = self._flags
        for words in flags:
            if words[FLAG] < value:
                for _ in range(QUICK if self._patience else 0):
                    if words[FLAG] >= value:
                        break
                else:
                    until = perf_counter() + self._patience
                    while words[FLAG] < value:
                        if perf_counter() > until:
                            return False
                        sched_yield()
        if WEAK_ORDER:
            self.fence()
        return True

    def find_peer(self, place: int) -> PeerSlot | None:
        """The peer slot of a member, if it has made the group by now."""
        peer = self._domain.local_peers[self.ranks[place]]
        slot = self.slots[place] = peer_slot(peer, self.group)
        return slot

    def _find_others(self) -> bool:
        """Whether all members have made the group."""
        others = [place for place in range(self.size) if place != self.place]
        if not all(self.slots[place] or self.find_peer(place) for place in others):
            return False
        self._flags = [self.slot(place).words for place in others]
        return True

    # The end --------------------------------------------------------------------------------

    def give_up(self) -> None:
        """A collective has failed here: memory that this rank has shown may change from now on."""
        self.words[BROKEN] = max(1, self.words[FLAG])
        self.fence()

    def broken(self, value: int) -> list[int]:
        """The members, as global ranks, that have given up at this epoch or before.

        What was read before from any other member was not overwritten meanwhile.
        """
        if WEAK_ORDER:
            self.fence()
        return [
            slot.rank
            for place, slot in enumerate(self.slots)
            if place != self.place and slot is not None and 0 < slot.words[BROKEN] <= value
        ]

    def close(self) -> None:
        """This rank leaves the group. The memory stays until the others have left, too."""
        self.words[CLOSED] = 1
        self._domain.closed.append(self._give_back)

    def _give_back(self) -> bool:
        """Free its memory, if all have closed the group, so that nobody reads it; whether so."""
        for other in self.others:
            slot = peer_slot(other, self.group)
            if slot is not None and not slot.words[CLOSED]:
                return False
        self._domain.directory.remove_control_block(self.group)
        for block in (self._block, self._stage):
            if block is not None:
                self._domain.arena.give_back(block)
        return True


# ------------------------------------------------------------------------------
# A peer slot: one member's control block, as another member sees it.
#
# words          of 64 bits, in cache lines of their own
# flag           at how many epochs of the group it has arrived
# entries        two, used in turn: the rolling hash up to the collective; segment + 1 (0: it is
#                staged) and offset of what it gives; the same of its result
# staged         segment + 1 and offset of its staging memory, once it has some
# closed         1 when it has closed the group
# broken         the epoch at which it had arrived when a collective failed there; 0: none has
# slots          two, used in turn, for small collectives

FLAG, ENTRIES, STAGED, CLOSED, BROKEN = 0, 8, 24, 32, 40  # words
ENTRY = 8  # words of an entry
GIVEN = (ENTRIES + 1, ENTRIES + ENTRY + 1)  # of either entry
RESULT = (ENTRIES + 3, ENTRIES + ENTRY + 3)
SLOTS = 4096  # byte at which they begin
SLOT = 64 << 10  # bytes of a slot
SIZE = SLOTS + 2 * SLOT


class Descriptors(NamedTuple):
    """Where memory of this rank lies that others may read: segment and offset."""

    given: tuple[int, int]
    result: tuple[int, int]


def peer_slot(peer: LocalPeer, group: int) -> PeerSlot | None:
    """What a local peer shows to the members of a group, once it has made that."""
    found = peer.control(group)
    try:
        return PeerSlot(peer.rank, peer, *found) if found is not None else None
    except (FileNotFoundError, ProcessLookupError):  # its process is gone, or has closed it
        return None


class PeerSlot:
    """One member's control block, as this rank sees it."""

    def __init__(
        self, rank: int, segments: list[Segment] | LocalPeer, number: int, offset: int
    ) -> None:
        self.rank = rank  # of the whole job
        self._segments = segments
        self._segment = segment = segments[number]
        self.words = segment.words[offset // 8 : (offset + SLOTS) // 8]
        self._slots = offset + SLOTS

    def slot(self, turn: int, count: int, dtype: torch.dtype) -> Tensor:
        """Its memory for a small tensor."""
        return tensor_at(self.slot_address(turn), count, dtype, keeping=self._segment)

    def slot_address(self, turn: int) -> int:
        """Where that is, in this process."""
        return self._segment.start + self._slots + turn * SLOT

    @property
    def stage_address(self) -> int:
        """The address of its staging memory, in this process."""
        return self.address(STAGED)

    def shown(self, turn: int) -> bool:
        """Whether its input lies in shared memory."""
        return self.words[GIVEN[turn]] != 0

    def address(self, word: int) -> int:
        """Where memory is, in this process, that it tells of in this word and the next one."""
        return self._segments[self.words[word] - 1].start + self.words[word + 1]


# ------------------------------------------------------------------------------
# An epoch as a step.


class ShmEpoch(Step):
    """A step: arrive at an epoch of a control block, and wait for the others.

    first    whether a collective begins with it
    last     whether it ends one in which members' own tensors were read: a member that has given
             up, and may have written its tensors, then counts as absent, whatever its flag
    shown    with `first`: where this rank's input and result lie, if others can read them there
    """

    __slots__ = ("_first", "_last", "_rolling_hash", "_shown", "control", "value")

    def __init__(
        self,
        control: ControlBlock,
        *,
        first: bool = False,
        last: bool = False,
        shown: Descriptors | None = None,
    ) -> None:
        self.control = control
        self.value = 0
        self._first = first
        self._last = last
        self._shown = shown
        self._rolling_hash = 0

    @override
    def begin(self, call: Call) -> None:
        """Show what was written, and arrive.

        The entry has the rolling hash of all collectives so far, not the fingerprint of this one:
        ranks that diverged before may do the same thing now, and a flag may overtake the message
        that would tell.
        """
        if self.value:
            return
        control, shown = self.control, self._shown
        words = control.words
        if self._first:
            self._rolling_hash = call.rolling_hash
            control.turn = 1 - control.turn
            words[ENTRIES + control.turn * ENTRY] = call.rolling_hash
            given = GIVEN[control.turn]
            if shown is None:
                words[given] = 0
            else:
                result = RESULT[control.turn]
                words[given], words[given + 1] = shown.given[0] + 1, shown.given[1]
                words[result], words[result + 1] = shown.result[0] + 1, shown.result[1]
        if WEAK_ORDER:
            control.fence()
        words[FLAG] = self.value = words[FLAG] + 1
        control.fence()  # between writing the flag and reading who is parked: see HostDomain.park
        for other in control.others:
            if other.words[ASLEEP]:
                other.wake()

    @override
    def ready(self, *, spin: bool = False) -> bool:
        """Whether all have arrived; if asked to spin, with the same rolling hash, too."""
        if not spin:
            return not self.waits_for()
        if not self.control.spin(self.value):
            return False
        if self._last and self.control.broken(self.value):
            return False
        return not self._first or self.diverged() is None

    @override
    def waits_for(self) -> list[int]:
        control, value = self.control, self.value
        absent = []
        for place, rank in enumerate(control.ranks):
            if place != control.place:
                slot = control.slots[place] or control.find_peer(place)
                if slot is None or slot.words[FLAG] < value:
                    absent.append(rank)
        return sorted({*absent, *control.broken(value)}) if self._last else absent

    @override
    def diverged(self) -> int | None:
        if not self._first:
            return None
        control, value, rolling_hash = self.control, self.value, self._rolling_hash
        entry = ENTRIES + control.turn * ENTRY
        for slot in control.slots:
            # The flag is read first: the entry read after it is the one shown with it.
            if slot is not None and slot.words[FLAG] >= value and slot.words[entry] != rolling_hash:
                return slot.rank
        return None
