"""A window: what one rank shows to the other members of a group, and what it sees of them.

Each member has one in its own memory, in which only it writes:

    flag        how many meetings of this group it has come to
    entry       what it is doing: a hash of the collective, and where what it gives lies, if that is
                shared memory; two, used in turn
    stage       where its staging memory is, once it has some
    slots       two pieces of `SLOT` bytes, used in turn, for small collectives

A *meeting* is where ranks wait for each other: a member shows something, raises its flag, and goes
on when all others have raised theirs as high. So after the nth meeting everyone may read what
everyone has shown before it. Nobody is more than one meeting ahead: what was shown before the
meeting before last has been read, and its memory may be written again. Hence two of everything.

Memory order: the data is written, then the flag; the other side reads the flag, then the data.
x86-64 keeps the order of stores, and that of loads; elsewhere a fence stands between the two on
both sides. Flags are words of 64 bits, aligned, which no processor writes in parts, each in a cache
line of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from os import sched_yield
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from phalanx.backends.shm.arena import Block
from phalanx.backends.shm.segment import Segment

if TYPE_CHECKING:
    from phalanx.backends.shm.commons import Commons

FLAG, ENTRIES, STAGED, CLOSED = 0, 8, 24, 32  # words
ENTRY = 8  # words: check; segment + 1 and offset of what is given; the same of the result
SLOTS = 4096  # byte at which they begin
SLOT = 64 << 10  # bytes
SIZE = SLOTS + 2 * SLOT
STAGE = 8 << 20  # bytes of staging memory, of which large tensors use all

_WORD = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15  # spreads numbers over a word (Knuth 1998, multiplicative hashing)

QUICK = 50  # looks at a flag, of some 0.1 us, before the processor is offered to others
PATIENCE = 200e-6  # seconds that a rank looks before it lies down to sleep


class Shown(NamedTuple):
    """Where memory of this rank lies that others may read: segment and offset."""

    given: tuple[int, int]
    result: tuple[int, int]


class Pane:
    """One member's window, as this rank sees it."""

    def __init__(self, rank: int, segment: Segment, offset: int, attach: Callable[[int], Segment]):
        self.rank = rank  # of the whole job
        self.words = segment.words[offset // 8 : (offset + SLOTS) // 8]
        self._segment = segment
        self._slots = offset + SLOTS
        self._attach = attach
        self._stage = 0

    def slot(self, turn: int, count: int, dtype: torch.dtype) -> Tensor:
        """A small piece of memory that it shows."""
        return self._segment.tensor(self._slots + turn * SLOT, count, dtype)

    def slot_address(self, turn: int) -> int:
        """Where that is, in this process."""
        return self._segment.start + self._slots + turn * SLOT

    @property
    def stage_address(self) -> int:
        """Where its staging memory is, in this process."""
        if not self._stage:
            words = self.words
            self._stage = self._attach(words[STAGED] - 1).start + words[STAGED + 1]
        return self._stage

    def shown(self, turn: int) -> bool:
        """Whether what it gives lies in shared memory."""
        return self.words[ENTRIES + turn * ENTRY + 1] != 0

    def given_address(self, turn: int) -> int:
        """Where that is, in this process."""
        entry = ENTRIES + turn * ENTRY
        return self._attach(self.words[entry + 1] - 1).start + self.words[entry + 2]

    def result_address(self, turn: int) -> int:
        """Where its result is, in this process."""
        entry = ENTRIES + turn * ENTRY
        return self._attach(self.words[entry + 3] - 1).start + self.words[entry + 4]


class Window:
    """One rank's, for one group, or for those of its members that share this rank's host.

    ranks    those members, as ranks of the whole job; a member's place here is its number in it
    place    this rank's
    panes    what each of them shows, this rank among them; None: it has not made the group yet
    turn     0 or 1: which entry and slot this collective uses
    phase    0 or 1: which half of the stage comes next
    """

    def __init__(self, commons: Commons, group: int, ranks: tuple[int, ...], rank: int) -> None:
        self.group = group
        self.ranks = ranks
        self.place = ranks.index(rank)
        self.size = len(ranks)
        self.turn = 0
        self.phase = 0
        self._commons = commons
        self._block = commons.arena.take(SIZE)
        self._stage: Block | None = None
        segment = commons.arena.segments[self._block.segment]
        offset = self._block.offset
        own = Pane(rank, segment, offset, commons.arena.segments.__getitem__)
        own.words[:] = memoryview(bytearray(SLOTS)).cast("Q")
        self.words = own.words
        self.panes: list[Pane | None] = [None] * self.size
        self.panes[self.place] = own
        self._others = [commons.neighbours[peer] for peer in ranks if peer != rank]
        self._flags: list[memoryview] = []  # the others' words, once all are known
        self._patience = 0.0 if any(other.is_here for other in self._others) else PATIENCE
        self._fence = commons.fence
        commons.ledger.add_window(group, self._block.segment, offset)

    @property
    def mine(self) -> Pane:
        """This rank's own pane."""
        pane = self.panes[self.place]
        assert pane is not None
        return pane

    def pane(self, place: int) -> Pane:
        """That of a member, which has come to a meeting of this group before."""
        pane = self.panes[place]
        assert pane is not None
        return pane

    # Showing --------------------------------------------------------------------------------

    def raise_flag(self) -> int:
        """Come to the next meeting: what was written before is shown. Its number."""
        words = self.words
        if self._commons.weak_order:
            self._fence()
        value: int = words[FLAG] + 1
        words[FLAG] = value
        self._fence()  # between the flag and the look at who sleeps: see Commons.lie_down
        for other in self._others:
            other.wake()
        return value

    def enter(self, check: int, shown: Shown | None) -> None:
        """Begin a collective: say what it is, and where what this rank gives lies."""
        self.turn = turn = 1 - self.turn
        words = self.words
        entry = ENTRIES + turn * ENTRY
        words[entry] = check
        if shown is None:
            words[entry + 1] = 0
        else:
            words[entry + 1] = shown.given[0] + 1
            words[entry + 2] = shown.given[1]
            words[entry + 3] = shown.result[0] + 1
            words[entry + 4] = shown.result[1]

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """Segment and offset of some memory of this rank, if others can see it."""
        return self._commons.arena.find(address, size)

    def make_stage(self) -> None:
        """See to it that this rank has staging memory."""
        if self._stage is None:
            self._stage = self._commons.arena.take(STAGE)
            words = self.words
            words[STAGED + 1] = self._stage.offset
            words[STAGED] = self._stage.segment + 1

    # Meeting --------------------------------------------------------------------------------

    def absent(self, value: int) -> list[int]:
        """The members, as ranks of the job, that have not come to a meeting yet."""
        return [
            rank
            for place, rank in enumerate(self.ranks)
            if place != self.place and not self._has_come(place, value)
        ]

    def stranger(self, value: int, check: int) -> int | None:
        """A member that has come to do something else, as a rank of the job, if there is one."""
        entry = ENTRIES + self.turn * ENTRY
        for pane in self.panes:
            # The flag first: what is read of the entry afterwards is what was shown with it.
            if pane is not None and pane.words[FLAG] >= value and pane.words[entry] != check:
                return pane.rank
        return None

    def spin(self, value: int) -> bool:
        """Wait a short while until all have come to a meeting; False if they have not."""
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
        if self._commons.weak_order:
            self._fence()
        return True

    def _has_come(self, place: int, value: int) -> bool:
        pane = self.panes[place]
        if pane is None:
            pane = self.panes[place] = self._commons.neighbours[self.ranks[place]].pane(self.group)
        return pane is not None and pane.words[FLAG] >= value

    def _find_others(self) -> bool:
        """Whether all members have made the group."""
        for place in range(self.size):
            self._has_come(place, 0)
        panes = [pane for place, pane in enumerate(self.panes) if place != self.place]
        if any(pane is None for pane in panes):
            return False
        self._flags = [pane.words for pane in panes if pane is not None]
        return True

    # The end --------------------------------------------------------------------------------

    def close(self) -> None:
        """This rank takes part no more. The memory stays until the others are done, too."""
        self.words[CLOSED] = 1
        self._commons.retire(self)

    def is_over(self) -> bool:
        """Whether nobody looks through it any more: every member has closed the group."""
        for other in self._others:
            pane = other.pane(self.group)
            if pane is not None and not pane.words[CLOSED]:
                return False
        return True

    def give_back(self) -> None:
        """The memory may be used for something else."""
        self._commons.ledger.remove_window(self.group)
        for block in (self._block, self._stage):
            if block is not None:
                self._commons.arena.give_back(block)


class Meet:
    """A step: come to a meeting of a window, and wait for the others.

    first    whether a collective begins with it
    shown    for the first: where what this rank gives and gets lies, if others can see it there
    """

    __slots__ = ("_check", "_first", "_shown", "value", "window")

    def __init__(self, window: Window, *, first: bool = False, shown: Shown | None = None) -> None:
        self.window = window
        self.value = 0
        self._first = first
        self._shown = shown
        self._check = 0

    def begin(self, fingerprint: int, sequence: int) -> None:
        """Show what was written, and come. Again: nothing."""
        if not self.value:
            if self._first:
                # Not fingerprints alone: ranks that are out of step may do the same thing now.
                self._check = (fingerprint ^ (sequence + 1) * _ODD) & _WORD
                self.window.enter(self._check, self._shown)
            self.value = self.window.raise_flag()

    def spin(self) -> bool:
        """Wait a short while; True if all have come, and to do the same."""
        if not self.window.spin(self.value):
            return False
        return not self._first or self.window.stranger(self.value, self._check) is None

    def absent(self) -> list[int]:
        """The ranks of the job that have not come."""
        return self.window.absent(self.value)

    def stranger(self) -> int | None:
        """A rank of the job that has come to do something else."""
        return self.window.stranger(self.value, self._check) if self._first else None
