"""A control block: what one rank shows to the other members of a group, and what it sees of them.

Each member has one in its own memory, in which only it writes: a flag, what it is doing, slots for
small tensors and staging memory for others. `PeerSlot` below has the layout.

An *epoch*: a member writes what it shows, raises its flag, and goes on when those it depends on
have raised theirs as high. So after the nth epoch it may read what they have shown before it. Most
depend on all, so nobody is more than one epoch ahead: what was shown before the epoch before last
has been read, and its memory may be written again. Hence there are two of everything.

A collective with a root does not hold up the one who only gives: it may be `AHEAD - 1` collectives
ahead of those who have not taken what it gave, so there are as many entries, and as many small
slots for what is given so. Who would be further ahead waits (`FlagWait`) until half of them are
free. A member that has arrived at one collective has read all that was shown for those before.

Memory order: the data is written, then the flag; the other side reads the flag, then the data.
x86-64 keeps the order of stores, and that of loads; elsewhere a fence stands between the two on
both sides. Flags are words of 64 bits, aligned, which no processor writes in parts, each in a cache
line of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import cpu_count, sched_yield
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.call import Call
from phalanx.core.steps import Step
from phalanx.errors import BackendUnavailableError
from phalanx.transport.shm.cross_memory import VARIABLE
from phalanx.transport.shm.directory import (
    ASLEEP,
    READS,
    WEAK_ORDER,
    LocalPeer,
    UnreadableError,
)
from phalanx.transport.shm.segments import Block, Segment, tensor_at

if TYPE_CHECKING:
    from phalanx.transport.shm.domain import HostDomain

STAGE = 8 << 20  # bytes of staging memory, of which large tensors use all
AHEAD = 16  # entries; with less, a root that waits for room is woken up for a few calls only
PARTS = 4  # of the staging memory: as many pieces of 2 MiB a root may be ahead
QUICK = 50  # looks at a flag, of some 0.1 us, before the processor is offered to others
KEPT = 1024  # addresses of which it is known whether they can be read
NEVER = 1 << 63  # no flag is raised as high
PATIENCE = 200e-6  # seconds that a rank spins before it parks


class ControlBlock:
    """One rank's, for one group, or for those of its members on this rank's host.

    ranks    those members, as ranks of the whole job; a member's place here is its number in it
    place    this rank's
    mine     this rank's own peer slot; `words` are its words
    slots    what each of them shows, this rank included; None: it has not made the group yet
    known    those of the others that have
    turn     the entry of the last collective; where its root ran ahead, 2 less than its small slot
    side     0 or 1: the small slot of the last collective in which all depended on all
    phase    0 or 1: which half of the staging memory is next in such a collective
    part     the part of the staging memory that a root which runs ahead uses next
    starts   of the last collectives, by their entries: the flags at their first epochs
    is_readable     each of them can read the ordinary memory of the others' processes, and gains
    share_of_cores  how many of this host's cores there are for each of its ranks, 0 if too few
    met      all others are known to have raised their flags as high
    needed   they have to, before the next collective may use its entry (`room`)
    late     the words of the member that this rank has waited for last; None: for nobody
    """

    def __init__(self, domain: HostDomain, group: int, ranks: tuple[int, ...], rank: int) -> None:
        self.group = group
        self.ranks = ranks
        self.place = ranks.index(rank)
        self.size = len(ranks)
        self.turn = self.side = self.phase = self.part = self.met = self.needed = 0
        self.starts = [0] * AHEAD
        self.late: memoryview | None = None
        # What the others' flags are when they have read a part, and all this rank has given so.
        self._read = [0] * PARTS
        self._staged = 0
        self._domain = domain
        self._block = domain.arena.take(SIZE)
        self._stage: Block | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._can_be_read: dict[int, bool] = {}
        number, offset, _ = self._block
        self.mine = PeerSlot(rank, domain.arena.segments, number, offset)
        self.words = self.mine.words
        self.words[:] = memoryview(bytearray(SLOTS)).cast("Q")
        self.slots: list[PeerSlot | None] = [None] * self.size
        self.slots[self.place] = self.mine
        self.known: list[PeerSlot] = []
        self.others = [domain.local_peers[peer] for peer in ranks if peer != rank]
        self._flags: dict[Places, list[memoryview]] = {}  # the words of others, once known
        words = [domain.directory.words, *(other.words for other in self.others)]
        self.is_readable = all(directory[READS] for directory in words)
        self._cores = cpu_count() or 1
        self.share_of_cores = self._cores // (1 + len(domain.local_peers))
        self._patience = 0.0 if any(other.is_here for other in self.others) else PATIENCE
        self.fence = domain.fence
        domain.directory.add_control_block(group, number, offset)

    def slot(self, place: int) -> PeerSlot:
        """The peer slot of a member that has arrived at an epoch of this group before."""
        slot = self.slots[place]
        assert slot is not None
        return slot

    def barrier(self) -> Iterator[Step]:
        """The steps of a barrier."""
        if self.met < self.needed:
            yield from self.room()
        yield ShmEpoch(self, first=True)

    # Running ahead ------------------------------------------------------------------------

    def room(self) -> Iterator[Step]:
        """The step, if it takes one, after which the next collective may use its entry."""
        if not self.have_met(self.needed):
            yield FlagWait(self, self.starts[(self.turn + 2 + AHEAD // 2) % AHEAD])

    def have_met(self, value: int) -> bool:
        """Whether all others are as far, without waiting."""
        flags = self._flags.get(None) or self._find(None)
        if flags is not None:
            self.met = max(self.met, min(words[FLAG] for words in flags))
        if WEAK_ORDER:
            self.fence()  # what they have read may be written from now on
        return self.met >= value

    def stage_free(self, *, ahead: bool) -> Iterator[Step]:
        """The step, if it takes one, after which this rank may stage in `part`, if it runs ahead.

        Else anywhere: all have read what it has staged as a root.
        """
        value = self._read[self.part] if ahead else self._staged
        if self.met < value and not self.have_met(value):
            yield FlagWait(self, value)

    def part_over(self, *, given: bool) -> None:
        """The root, which this rank is if it has `given`, has staged there for the last epoch.

        All others have read it when they come to their next one.
        """
        if given:
            self._read[self.part] = self._staged = self.words[FLAG] + 1
        self.part = (self.part + 1) % PARTS

    def stage_over(self) -> None:
        """A collective is over in which all have staged, and read each other's memory."""
        self._read = [self.words[FLAG] + 1] * PARTS

    # Memory ----------------------------------------------------------------------------------

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """The segment and offset of some memory of this rank, if it lies in shared memory."""
        for number, segment in enumerate(self._domain.arena.segments):
            offset = address - segment.start
            if offset >= 0 and offset + size <= segment.size:
                return number, offset
        return None

    def can_be_read(self, address: int) -> bool:
        """Whether the kernel copies memory from there: none that a device's driver has mapped.

        So page-locked memory may not be. Others could not read what this rank cannot read so.
        """
        known = self._can_be_read.get(address)
        if known is None:
            if len(self._can_be_read) >= KEPT:
                self._can_be_read.clear()
            known = self._can_be_read[address] = address == 0 or self._domain.can_read(address)
        return known

    def is_crowded(self) -> bool:
        """Whether more threads than this host has cores want to compute, at this moment."""
        return self._domain.running() > self._cores

    def make_stage(self) -> None:
        """Allocate this rank's staging memory, once."""
        if self._stage is None:
            self._stage = self._domain.arena.take(STAGE)
            words = self.words
            words[STAGED + 1] = self._stage.offset
            words[STAGED] = self._stage.segment + 1

    def scratch(self, size: int) -> int:
        """The address of so many bytes of this rank's own, for what it reads."""
        if self._scratch.nbytes < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def unreadable(self, error: UnreadableError) -> Iterator[Step]:
        """Ordinary memory of a peer could not be read: wait for its end if it has gone.

        So it does if it has given up. Else the kernel does not allow it any more: raises.
        """
        peer = error.peer
        if error.is_gone or peer.rank in self.broken(self.words[FLAG]):
            yield FlagWait(self, NEVER, (self.ranks.index(peer.rank),))
        raise BackendUnavailableError(
            f"rank {self.ranks[self.place]}: the memory of rank {peer.rank} cannot be read any "
            f"more, as it could when they met: {error}. If its process takes that right back, or "
            f"its tensor lies in memory of a device, set {VARIABLE}=off on all ranks",
            rank=self.ranks[self.place],
        )

    # Epoch --------------------------------------------------------------------------------

    def spin(self, value: int, places: Places, seconds: float = PATIENCE) -> bool:
        """Spin a short while until these have arrived at an epoch; False if they have not.

        For so many seconds at most; for less where it does not pay.
        """
        flags = self._flags.get(places)
        if flags is None:
            flags = self._find(places)
            if flags is None:
                return False
        for words in flags:
            if words[FLAG] < value:
                self.late = words
                for _ in range(QUICK if self._patience else 0):
                    if words[FLAG] >= value:
                        break
                else:
                    until = perf_counter() + min(self._patience, seconds)
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
        if slot is not None:
            self.known.append(slot)
        return slot

    def _find(self, places: Places) -> list[memoryview] | None:
        """The words of these members, if all of them have made the group."""
        others = places
        if others is None:
            others = tuple(place for place in range(self.size) if place != self.place)
        if not all(self.slots[place] or self.find_peer(place) for place in others):
            return None
        flags = self._flags[places] = [self.slot(place).words for place in others]
        return flags

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
        self.have_met(self.words[FLAG])  # finds those who have made it by now
        self.words[CLOSED] = 1
        self._domain.closed.append(self._give_back)

    def _give_back(self) -> bool:
        """Free its memory, if all have closed the group, so that nobody reads it; whether so."""
        for place, rank in enumerate(self.ranks):
            if place == self.place:
                continue
            slot = peer_slot(self._domain.local_peers[rank], self.group)
            if slot is not None and not slot.words[CLOSED]:
                return False
            if slot is None and self.slots[place] is None and self.met < self.words[FLAG]:
                return False  # it may still come, and read what this rank has shown
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
# staged         segment + 1 and offset of its staging memory, once it has some
# closed         1 when it has closed the group
# broken         the epoch at which it had arrived when a collective failed there; 0: none has
# entries        used in turn: the rolling hash up to the collective; segment + 1 (0: it is staged)
#                and offset of what it gives, or `ORDINARY` + 1 and its address in its process; the
#                same of its result
# slots          for small collectives: two used in turn, then one for each entry

FLAG, STAGED, CLOSED, BROKEN, ENTRIES = 0, 8, 16, 24, 32  # words
ENTRY = 8  # words of an entry
ORDINARY = 1 << 32  # for a segment: ordinary memory, which is read by cross-memory attach
GIVEN = tuple(ENTRIES + turn * ENTRY + 1 for turn in range(AHEAD))  # of each entry
RESULT = tuple(ENTRIES + turn * ENTRY + 3 for turn in range(AHEAD))
SLOTS = 4096  # byte at which they begin
SLOT = 64 << 10  # bytes of a slot
SIZE = SLOTS + (2 + AHEAD) * SLOT


class Descriptors(NamedTuple):
    """Where memory of this rank lies that others may read: segment and offset, or `ORDINARY`."""

    given: tuple[int, int]
    result: tuple[int, int]


Region: TypeAlias = "tuple[int, LocalPeer | None]"
"""An address, and in whose process it is ordinary memory; None: it can be read here."""


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
        self.peer = segments if isinstance(segments, LocalPeer) else None  # whose slot it is
        self._segments = segments
        self._segment = segment = segments[number]
        self.words = segment.words[offset // 8 : (offset + SLOTS) // 8]
        self._slots = offset + SLOTS

    def slot(self, number: int, count: int, dtype: torch.dtype) -> Tensor:
        """Its memory for a small tensor."""
        return tensor_at(self.slot_address(number), count, dtype, keeping=self._segment)

    def slot_address(self, number: int) -> int:
        """Where that is, in this process."""
        return self._segment.start + self._slots + number * SLOT

    @property
    def stage_address(self) -> int:
        """The address of its staging memory, in this process."""
        return self.address(STAGED)

    def shown(self, turn: int) -> bool:
        """Whether others read its input where it is."""
        return self.words[GIVEN[turn]] != 0

    def region(self, word: int) -> Region:
        """Where memory is that it tells of in this word and the next one."""
        if self.words[word] <= ORDINARY:
            return self.address(word), None
        return self.words[word + 1], self.peer

    def address(self, word: int) -> int:
        """Where shared memory is, in this process, that it tells of in this word and the next."""
        return self._segments[self.words[word] - 1].start + self.words[word + 1]


# ------------------------------------------------------------------------------
# Steps: waiting for flags, and an epoch.

Places: TypeAlias = "tuple[int, ...] | None"
"""Members of a group, by their places in a control block; None: all but this rank."""


class FlagWait(Step):
    """A step: wait until some members have raised their flags."""

    __slots__ = ("control", "places", "value")
    blocks = True

    def __init__(self, control: ControlBlock, value: int, places: Places = None) -> None:
        self.control = control
        self.value = value
        self.places = places

    @override
    def begin(self, call: Call) -> None:
        """Nothing: it only waits."""

    @override
    def ready(self, *, spin: float = 0.0) -> bool:
        control, value = self.control, self.value
        if not (control.spin(value, self.places, spin) if spin else not self.waits_for()):
            return False
        if self.places is None and value > control.met:
            control.met = value
        return True

    @override
    def block(self, seconds: float) -> bool:
        """Spin a short while, with the lock held: most waits are shorter than it takes to park.

        Not where another rank needs the core.
        """
        return self.control.share_of_cores > 0 and self.control.spin(self.value, self.places)

    @override
    def waits_for(self) -> list[int]:
        control, value, absent = self.control, self.value, []
        others = range(control.size) if self.places is None else self.places
        for place in others:
            if place != control.place:
                slot = control.slots[place] or control.find_peer(place)
                if slot is None or slot.words[FLAG] < value:
                    absent.append(control.ranks[place])
                    control.late = slot.words if slot is not None else None
        return absent

    @override
    def awaited(self) -> int | None:
        control = self.control
        late = control.late
        if late is None:
            return None
        control.late = None
        for slot in control.known:
            if slot.words is late:
                return slot.rank
        return None


class ShmEpoch(FlagWait):
    """A step: arrive at an epoch of a control block, and wait for those on whom this rank depends.

    first    whether a collective begins with it
    last     whether it ends one in which members' own tensors were read: a member that has given
             up, and may have written its tensors, then counts as absent, whatever its flag
    shown    with `first`: where this rank's input and result lie, if others can read them there
    """

    __slots__ = ("_first", "_last", "_rolling_hash", "_shown")

    def __init__(
        self,
        control: ControlBlock,
        *,
        first: bool = False,
        last: bool = False,
        shown: Descriptors | None = None,
        places: Places = None,
    ) -> None:
        self.control = control
        self.value = 0
        self.places = places
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
            starts = control.starts
            control.turn = turn = (control.turn + 1) % AHEAD
            starts[turn] = words[FLAG] + 1
            control.needed = starts[(turn + 2) % AHEAD]
            words[ENTRIES + turn * ENTRY] = call.rolling_hash
            given = GIVEN[turn]
            if shown is None:
                words[given] = 0
            else:
                result = RESULT[turn]
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
    def ready(self, *, spin: float = 0.0) -> bool:
        """Whether they have arrived; if asked to spin, with the same rolling hash, too."""
        control, value = self.control, self.value
        if not spin:
            return super().ready()
        if not control.spin(value, self.places, spin):
            return False
        if self.places is None:
            control.met = value
        if self._last and control.broken(value):
            return False
        return not self._first or self.diverged() is None

    @override
    def waits_for(self) -> list[int]:
        absent = super().waits_for()
        return sorted({*absent, *self.control.broken(self.value)}) if self._last else absent

    @override
    def diverged(self) -> int | None:
        if not self._first:
            return None
        control, value, rolling_hash = self.control, self.value, self._rolling_hash
        entry = ENTRIES + control.turn * ENTRY
        for slot in control.known:
            words = slot.words
            # The flag is read first: the entry read after it is the one shown with it.
            if words[FLAG] >= value and words[entry] != rolling_hash:
                return slot.rank
        return None
