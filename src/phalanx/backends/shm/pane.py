"""A pane: one member's window, as another member sees it.

words          of 64 bits, in cache lines of their own
flag           how many meetings of the group it has come to
entries        two, used in turn: the trail up to the collective; segment + 1 (0: it is staged) and
               offset of what it gives; the same of its result
staged         segment + 1 and offset of its staging memory, once it has some
closed         1 when it has closed the group
broken         the meeting that it had come to when it gave up what was under way; 0: it has not
slots          two, used in turn, for small collectives
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.backends.shm.segment import Segment

FLAG, ENTRIES, STAGED, CLOSED, BROKEN = 0, 8, 24, 32, 40  # words
ENTRY = 8  # words of an entry
SLOTS = 4096  # byte at which they begin
SLOT = 64 << 10  # bytes of a slot
SIZE = SLOTS + 2 * SLOT


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
