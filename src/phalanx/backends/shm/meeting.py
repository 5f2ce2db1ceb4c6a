"""A meeting, as a step of an operation."""

from __future__ import annotations

from phalanx.backends.shm.pane import Shown
from phalanx.backends.shm.window import Window


class Meet:
    """A step: come to a meeting of a window, and wait for the others.

    first    whether a collective begins with it
    last     whether it ends one in which members' own tensors were read: one that has given up
             here, and may have written them meanwhile, has not come, though its flag says so
    shown    for the first: where what this rank gives and gets lies, if others can see it there
    """

    __slots__ = ("_first", "_last", "_shown", "_trail", "value", "window")

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
        self._trail = 0

    def begin(self, trail: int) -> None:
        """Show what was written, and come. Again: nothing.

        trail   all that the group was asked to do up to now (`engine/trail.py`), not only this
                collective's fingerprint: ranks that have parted may do the same thing now, and a
                flag comes before a message from which they would have learned it
        """
        if not self.value:
            if self._first:
                self._trail = trail
                self.window.enter(trail, self._shown)
            self.value = self.window.raise_flag()

    def spin(self) -> bool:
        """Wait a short while; True if all have come, by the same trail."""
        if not self.window.spin(self.value):
            return False
        if self._last and self.window.broken(self.value):
            return False
        return not self._first or self.window.stranger(self.value, self._trail) is None

    def absent(self) -> list[int]:
        """The ranks of the job that have not come."""
        absent = self.window.absent(self.value)
        return sorted({*absent, *self.window.broken(self.value)}) if self._last else absent

    def stranger(self) -> int | None:
        """A rank of the job that has come to do something else, or after something else."""
        return self.window.stranger(self.value, self._trail) if self._first else None
