"""When a step is over, whatever number of optimizers it takes.

one optimizer             [ w b ]      [ w b ]         each is a step
two, one after the other  [ w ] [ b ]  [ w ] [ b ]     two of them are a step
nobody has b              [ w ]     |  [ w ]           over when w comes again; from then on,
                                                       at once
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Writes:
    """Which parameters have been written since the last step was over.

    A step is over when all of them are, or before one of them is written a second time. Those that
    are not written by then are nobody's: they are not waited for until somebody writes them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = frozenset(parameters)
        self._written: set[nn.Parameter] = set()
        self._nobodys: set[nn.Parameter] = set()

    @property
    def begun(self) -> bool:
        """Whether some are written, and not all."""
        return bool(self._written)

    def before(self, parameters: Iterable[nn.Parameter]) -> bool:
        """These are about to be written: whether a step is over by that."""
        if self._written.isdisjoint(parameters):
            return False
        self._nobodys |= self._all - self._written
        self._written.clear()
        return True

    def after(self, parameters: Iterable[nn.Parameter]) -> bool:
        """They have been: whether a step is over by that."""
        mine = self._all.intersection(parameters)
        self._nobodys -= mine
        self._written |= mine
        if not mine or not self._written >= self._all - self._nobodys:
            return False
        self._written.clear()
        return True

    def close(self) -> None:
        """Whatever is written belongs to a step that is over."""
        self._written.clear()
