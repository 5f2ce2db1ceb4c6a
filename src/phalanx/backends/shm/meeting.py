"""A meeting, as a step of an operation."""

from __future__ import annotations

from phalanx.backends.shm.pane import Shown
from phalanx.backends.shm.window import Window

_WORD = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15  # spreads numbers over a word (Knuth 1998, multiplicative hashing)


class Meet:
    """A step: come to a meeting of a window, and wait for the others.

    first    whether a collective begins with it
    last     whether it ends one in which members' own tensors were read: one that has given up
             here, and may have written them meanwhile, has not come, though its flag says so
    shown    for the first: where what this rank gives and gets lies, if others can see it there
    """

    __slots__ = ("_check", "_first", "_last", "_shown", "value", "window")

    def __init__(
        self,
        window: Window,
        *,
        first: bool = False,
        last: bool = False,
        shown: Shown | None = None,
    ) -> None:
        self.window = window
        self.value = 0
        self._first = first
        self._last = last
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
        if self._last and self.window.broken(self.value):
            return False
        return not self._first or self.window.stranger(self.value, self._check) is None

    def absent(self) -> list[int]:
        """The ranks of the job that have not come."""
        absent = self.window.absent(self.value)
        return sorted({*absent, *self.window.broken(self.value)}) if self._last else absent

    def stranger(self) -> int | None:
        """A rank of the job that has come to do something else."""
        return self.window.stranger(self.value, self._check) if self._first else None
