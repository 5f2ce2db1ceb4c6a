"""A control block: one rank's memory for the other members of a group, and its view of theirs.

Each member has one in its own memory, in which only it writes: a flag, its operation, slots for
small tensors and staging memory for others (`peer_slot.py` has the layout, `epoch.py` the meaning
of a flag).
"""

from __future__ import annotations

from collections.abc import Iterator
from os import cpu_count
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.shared_group import (
    Descriptors,
    Location,
    Places,
    Region,
    SharedGroup,
    UnreadableError,
)
from phalanx.core.steps import Step
from phalanx.errors import BackendUnavailableError
from phalanx.transport.crowding import is_crowded
from phalanx.transport.shm.cross_memory import VARIABLE
from phalanx.transport.shm.directory import READS, WEAK_ORDER
from phalanx.transport.shm.epoch import PATIENCE, FlagWait, ShmEpoch
from phalanx.transport.shm.peer_slot import (
    AHEAD,
    BROKEN,
    CLOSED,
    FLAG,
    GIVEN,
    ORDINARY,
    RESULT,
    SIZE,
    SLOT,
    SLOTS,
    STAGED,
    PeerSlot,
    peer_slot,
)
from phalanx.transport.shm.segments import Block

if TYPE_CHECKING:
    from phalanx.transport.shm.domain import HostDomain

STAGE = 8 << 20  # bytes of staging memory, of which large tensors use all
PARTS = 4  # of that memory
KEPT = 1024  # addresses of which it is known whether they can be read
NEVER = 1 << 63  # no flag is raised as high


class ControlBlock(SharedGroup):
    """One rank's control block for one group, or for the group's members on this rank's host.

    ranks      those members, as ranks of the whole job; a member's place is its number among them
    mine       this rank's own peer slot; `words` are its words
    slots_of   the peer slot of each, this rank included; None: it has not made the group yet
    known      those of the others that have
    run_ahead  the entry, slot and part of the staging memory that this rank uses next
    met        all others are known to have raised their flags as high
    flags      the words of members, once all of them have made the group
    patience   seconds that this rank spins at most
    late       the words of the member that this rank has waited for last; None: for nobody
    """

    slot_size = SLOT
    slots = 2 + AHEAD
    part_size = STAGE // PARTS

    def __init__(self, domain: HostDomain, group: int, ranks: tuple[int, ...], rank: int) -> None:
        self.group = group
        self.ranks = ranks
        self.place = ranks.index(rank)
        self.size = len(ranks)
        self.run_ahead = RunAhead()
        self.met = 0
        self.late: memoryview | None = None
        self._domain = domain
        self._block = domain.arena.take(SIZE)
        self._stage: Block | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._can_be_read: dict[int, bool] = {}
        number, offset, _ = self._block
        self.mine = PeerSlot(rank, domain.arena.segments, number, offset)
        self.words = self.mine.words
        self.words[:] = memoryview(bytearray(SLOTS)).cast("Q")
        self.slots_of: list[PeerSlot | None] = [None] * self.size
        self.slots_of[self.place] = self.mine
        self.known: list[PeerSlot] = []
        self.others = [domain.local_peers[peer] for peer in ranks if peer != rank]
        self.flags: dict[Places, list[memoryview]] = {}
        words = [domain.directory.words, *(other.words for other in self.others)]
        self.is_readable = all(directory[READS] for directory in words)
        self.share_of_cores = (cpu_count() or 1) // (1 + len(domain.local_peers))
        self.patience = 0.0 if any(other.is_here for other in self.others) else PATIENCE
        self.fence = domain.fence
        domain.directory.add_control_block(group, number, offset)

    def peer(self, place: int) -> PeerSlot:
        """Return the peer slot of a member that has arrived at an epoch of this group before."""
        slot = self.slots_of[place]
        assert slot is not None
        return slot

    @override
    def barrier(self) -> Iterator[Step]:
        step = self.wait_for_entry()
        if step is not None:
            yield step
        yield ShmEpoch(self, first=True)

    @override
    def epoch(
        self,
        *,
        first: bool = False,
        last: bool = False,
        shown: Descriptors | None = None,
        places: Places = None,
    ) -> Step:
        return ShmEpoch(self, first, last, shown, places)

    # Slots and staging memory -----------------------------------------------------------------

    @override
    def wait_for_entry(self) -> Step | None:
        needed = self.run_ahead.needed
        if self.met >= needed or self.have_met(needed):
            return None
        return FlagWait(self, self.run_ahead.half_free)

    def have_met(self, value: int) -> bool:
        """Return, without waiting, whether all others have raised their flags as high."""
        flags = self.flags.get(None) or self.find_flags(None)
        if flags is not None:
            self.met = max(self.met, min(words[FLAG] for words in flags))
        if WEAK_ORDER:
            self.fence()  # memory that they have read may be written from now on
        return self.met >= value

    @override
    def next_slot(self, *, ahead: bool) -> int:
        return self.run_ahead.next_slot(ahead=ahead)

    @override
    def slot_address(self, place: int, number: int) -> int:
        return self.peer(place).slot_address(number)

    @override
    def slot(self, place: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
        return self.peer(place).slot(number, count, dtype)

    @override
    def wait_for_part(self, *, ahead: bool) -> Step | None:
        """See `SharedGroup`. The staging memory is allocated with the first call."""
        if self._stage is None:
            self._stage = self._domain.arena.take(STAGE)
            words = self.words
            words[STAGED + 1] = self._stage.offset
            words[STAGED] = self._stage.segment + 1
        value = self.run_ahead.part_free(ahead=ahead)
        if self.met >= value or self.have_met(value):
            return None
        return FlagWait(self, value)

    @override
    def part(self, *, ahead: bool) -> int:
        return self.run_ahead.part(ahead=ahead)

    @override
    def leave_part(self, *, ahead: bool, gave: bool) -> None:
        self.run_ahead.leave_part(self.words[FLAG], ahead=ahead, gave=gave)

    @override
    def leave_stage(self) -> None:
        self.run_ahead.leave_stage(self.words[FLAG])

    @override
    def stage_address(self, place: int) -> int:
        return self.peer(place).stage_address

    # Members' own tensors ---------------------------------------------------------------------

    @override
    def find(self, address: int, size: int) -> Location | None:
        for number, segment in enumerate(self._domain.arena.segments):
            offset = address - segment.start
            if offset >= 0 and offset + size <= segment.size:
                return number, offset
        return None

    @override
    def find_ordinary(self, address: int) -> Location | None:
        """See `SharedGroup`. The kernel does not copy what a device's driver has mapped.

        So page-locked memory may not be read: others cannot read it either, if this rank cannot.
        """
        known = self._can_be_read.get(address)
        if known is None:
            if len(self._can_be_read) >= KEPT:
                self._can_be_read.clear()
            known = self._can_be_read[address] = address == 0 or self._domain.can_read(address)
        return (ORDINARY, address) if known else None

    @override
    def is_crowded(self) -> bool:
        return is_crowded()

    @override
    def shown(self, place: int) -> tuple[Region, Region] | None:
        slot, turn = self.slots_of[place], self.run_ahead.turn
        assert slot is not None
        words, entry = slot.words, (GIVEN[turn], RESULT[turn])
        if not words[entry[0]]:
            return None
        given, result = (
            (offset, slot.peer)
            if segment > ORDINARY
            else (slot.segments[segment - 1].start + offset, None)
            for segment, offset in [(words[word], words[word + 1]) for word in entry]
        )
        return given, result

    @override
    def scratch(self, size: int) -> int:
        if self._scratch.nbytes < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()

    @override
    def after(self, error: UnreadableError) -> Step:
        if error.is_gone or error.rank in self.broken(self.words[FLAG]):
            return FlagWait(self, NEVER, (self.ranks.index(error.rank),))
        raise BackendUnavailableError(
            f"rank {self.ranks[self.place]}: the memory of rank {error.rank} cannot be read any "
            f"more, as it could when they met: {error}. If its process takes that right back, or "
            f"its tensor lies in memory of a device, set {VARIABLE}=off on all ranks",
            rank=self.ranks[self.place],
        )

    # Epoch --------------------------------------------------------------------------------

    def find_peer(self, place: int) -> PeerSlot | None:
        """Return the peer slot of a member, if it has made the group by now."""
        peer = self._domain.local_peers[self.ranks[place]]
        slot = self.slots_of[place] = peer_slot(peer, self.group)
        if slot is not None:
            self.known.append(slot)
        return slot

    def find_flags(self, places: Places) -> list[memoryview] | None:
        """Return the words of these members, if all of them have made the group."""
        others = places
        if others is None:
            others = tuple(place for place in range(self.size) if place != self.place)
        if not all(self.slots_of[place] or self.find_peer(place) for place in others):
            return None
        flags = self.flags[places] = [self.peer(place).words for place in others]
        return flags

    # The end --------------------------------------------------------------------------------

    @override
    def give_up(self) -> None:
        self.words[BROKEN] = max(1, self.words[FLAG])
        self.fence()

    def broken(self, value: int) -> list[int]:
        """Return the members, as global ranks, that have given up at this epoch or before.

        Earlier reads from any other member are valid: that memory was not overwritten meanwhile.
        """
        if WEAK_ORDER:
            self.fence()
        return [
            slot.rank
            for place, slot in enumerate(self.slots_of)
            if place != self.place and slot is not None and 0 < slot.words[BROKEN] <= value
        ]

    @override
    def close(self) -> None:
        """Leave the group. The memory stays until the others have left, too."""
        self.have_met(self.words[FLAG])  # finds those who have made it by now
        self.words[CLOSED] = 1
        self._domain.closed.append(self._give_back)

    def _give_back(self) -> bool:
        """Free its memory if all have closed the group: nobody reads it. Return whether it did."""
        for place, rank in enumerate(self.ranks):
            if place == self.place:
                continue
            slot = peer_slot(self._domain.local_peers[rank], self.group)
            if slot is not None and not slot.words[CLOSED]:
                return False
            if slot is None and self.slots_of[place] is None and self.met < self.words[FLAG]:
                return False  # it may still come, and read what this rank has shown
        self._domain.directory.remove_control_block(self.group)
        for block in (self._block, self._stage):
            if block is not None:
                self._domain.arena.give_back(block)
        return True


class RunAhead:
    """The entry, slot and part of its staging memory that a member uses next, and when.

    Most collectives hold up all members, so nobody is more than one epoch ahead: two slots and two
    parts of staging memory, used in turn, are enough. A collective with a root does not hold up a
    member that only gives. It may be `AHEAD - 1` collectives ahead of those who have not taken what
    it gave, and so has an entry, and a slot, for each; and `PARTS` parts of large tensors.

    A member's entries when it has begun collective #19; of one epoch each:

        entry        0    1    2    3    4    5    6   ...   14   15
        collective  #16  #17  #18  #19   #4   #5   #6  ...  #14  #15
        flag         17   18   19   20    5    6    7  ...   15   16     at its first epoch
                                    ^     ^    ^
                                 turn     |    needed: who has arrived here has read what #4 showed
                                          #20 is next, and may use this entry once all others have

    A member that finds no entry free waits until half of them are: else it would be woken up for
    one collective at a time.

    turn     the entry of the last collective
    starts   by entry: the member's flag at the first epoch of the collective that used it last
    needed   the flag that all others have to have, before the next collective may begin
    """

    __slots__ = ("_half", "_part", "_read", "_side", "_staged", "needed", "starts", "turn")

    def __init__(self) -> None:
        self.turn = self.needed = 0
        self.starts = [0] * AHEAD
        self._side = 0  # the slot of the last collective that held up all
        self._half = 0  # the next part of such a collective
        self._part = 0  # the next part of a root that runs ahead
        # The flags that others have when they have read a root's part: by part, and the last.
        self._read = [0] * PARTS
        self._staged = 0

    def begin(self, flag: int) -> int:
        """Begin a collective whose first epoch this flag is. Return its entry."""
        starts = self.starts
        self.turn = turn = (self.turn + 1) % AHEAD
        starts[turn] = flag
        self.needed = starts[(turn + 2) % AHEAD]
        return turn

    @property
    def half_free(self) -> int:
        """Return the flag that others have when half of the entries are free."""
        return self.starts[(self.turn + 2 + AHEAD // 2) % AHEAD]

    def next_slot(self, *, ahead: bool) -> int:
        """Return the slot of the next collective: one of two, or the one of its entry."""
        if ahead:
            return 2 + (self.turn + 1) % AHEAD
        self._side = side = 1 - self._side
        return side

    def part(self, *, ahead: bool) -> int:
        """Return the part of the staging memory that is used next."""
        return self._part if ahead else self._half

    def part_free(self, *, ahead: bool) -> int:
        """Return the flag that others have when they have read that part; or, if this member does
        not run ahead, all that it has staged as a root.
        """
        return self._read[self._part] if ahead else self._staged

    def leave_part(self, flag: int, *, ahead: bool, gave: bool) -> None:
        """Go to the next part.

        A root has staged in this one for the epoch of `flag`. All others have read it when they
        come to the one after.
        """
        if not ahead:
            self._half = 1 - self._half
            return
        if gave:
            self._read[self._part] = self._staged = flag + 1
        self._part = (self._part + 1) % PARTS

    def leave_stage(self, flag: int) -> None:
        """End a collective with the epoch of `flag`, in which all have staged and read."""
        self._read = [flag + 1] * PARTS
