"""The steps of collectives in shared memory: waiting for flags, and epochs.

An *epoch*: a member writes its data, raises its flag, and goes on when the members that it depends
on have raised theirs as high. So after the nth epoch it may read the data that they wrote before
it. Most depend on all, so nobody is more than one epoch ahead: data from before the epoch before
last has been read, and its memory may be written again.

Memory order: the data is written, then the flag; the other side reads the flag, then the data.
x86-64 keeps the order of stores, and that of loads; elsewhere a fence stands between the two on
both sides. Flags are words of 64 bits, aligned, which no processor writes in parts, each in a cache
line of its own.
"""

from __future__ import annotations

from os import sched_yield
from time import perf_counter
from typing import TYPE_CHECKING

from typing_extensions import override

from phalanx.core.call import Call
from phalanx.core.shared_group import Descriptors, Places
from phalanx.core.steps import Step
from phalanx.transport.shm.directory import ASLEEP, WEAK_ORDER
from phalanx.transport.shm.peer_slot import ENTRIES, ENTRY, FLAG, GIVEN, RESULT

if TYPE_CHECKING:
    from phalanx.transport.shm.control import ControlBlock


QUICK = 50  # looks at a flag, of some 0.1 us, before the processor is offered to others
PATIENCE = 200e-6  # seconds that a rank spins before it parks


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
        pass  # it only waits

    @override
    def ready(self, *, spin: float = 0.0) -> bool:
        return self.have_come(spin)

    def have_come(self, spin: float) -> bool:
        """Return whether they have. It spins for less than it may where that does not pay."""
        control, value, places = self.control, self.value, self.places
        flags = control.flags.get(places)
        if flags is None:
            flags = control.find_flags(places)
            if flags is None:
                return False
        for words in flags:
            if words[FLAG] < value:
                control.late = words
                if not spin:
                    return False
                for _ in range(QUICK if control.patience else 0):
                    if words[FLAG] >= value:
                        break
                else:
                    until = perf_counter() + min(control.patience, spin)
                    while words[FLAG] < value:
                        if perf_counter() > until:
                            return False
                        sched_yield()
        if WEAK_ORDER:
            control.fence()
        if places is None and value > control.met:
            control.met = value
        return True

    @override
    def block(self, seconds: float) -> bool:
        """Spin a short while, with the lock held: most waits are shorter than it takes to park.

        Does not spin if another rank needs the core.
        """
        return self.control.share_of_cores > 0 and self.have_come(PATIENCE)

    @override
    def waits_for(self) -> list[int]:
        control, value, absent = self.control, self.value, []
        others = range(control.size) if self.places is None else self.places
        for place in others:
            if place != control.place:
                slot = control.slots_of[place] or control.find_peer(place)
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
    shown    with `first`: places of this rank's input and result, if others can read them there
    """

    __slots__ = ("_first", "_last", "_rolling_hash", "_shown")

    def __init__(
        self,
        control: ControlBlock,
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
        """Publish the written data, and arrive.

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
            turn = control.run_ahead.begin(words[FLAG] + 1)
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
        """Return whether they have arrived, with the same rolling hash."""
        if not self.have_come(spin):
            return False
        if self._last and self.control.broken(self.value):
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
        entry = ENTRIES + control.run_ahead.turn * ENTRY
        for slot in control.known:
            words = slot.words
            # The flag is read first: the entry read after it is the one shown with it.
            if words[FLAG] >= value and words[entry] != rolling_hash:
                return slot.rank
        return None
