"""Counting of steps, by any number of optimizers. Nothing is sent.

one optimizer             [ w b ]      [ w b ]         each is a step
two, one after the other  [ w ] [ b ]  [ w ] [ b ]     two of them are a step
nobody has b              [ w ]     |  [ w ]           over when w comes again; from then on,
                                                       at once
a scaler skips one           -  [ b ]  [ w ] [ b ]     two steps; none if it skips both
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn


class StepCounter:
    """Counts steps by the parameters that have been written since the last step was over.

    A step is over when all of them are, or before one of them is written a second time. Those that
    are not written by then have no optimizer: they are not waited for until somebody writes them.

    trained   the parameters whose writing is a step
    steps     number of finished ones
    since     those of them since the last sync
    syncs     number of syncs
    weight    of the next step, if `step()` came before it; not of those that are skipped
    seen      the sum of the weights since the last sync; None: there were none
    """

    def __init__(self, trained: Iterable[nn.Parameter]) -> None:
        self.steps = self.since = self.syncs = 0
        self.weight: float | None = None
        self.seen: float | None = None
        self.trained = frozenset(trained)
        self._written: set[nn.Parameter] = set()
        self._skipped: set[nn.Parameter] = set()
        self._without_optimizer: set[nn.Parameter] = set()

    def before(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Take these as about to be written; return whether a step is over by that."""
        if self._written.isdisjoint(parameters):
            return False
        self._without_optimizer |= self.trained - self._written - self._skipped
        self.close()
        return True

    def after(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Take these as written; return whether a step is over by that."""
        mine = self.trained.intersection(parameters)
        self._without_optimizer -= mine
        self._written |= mine
        if mine and self.weight is not None:
            self.seen, self.weight = (self.seen or 0.0) + self.weight, None
        return bool(mine) and self._is_over()

    def skip(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Take these as not written in this step; return whether a step is over by that."""
        self._skipped |= self.trained.intersection(parameters)
        return self._is_over()

    def _is_over(self) -> bool:
        if not self._written | self._skipped >= self.trained - self._without_optimizer:
            return False
        counts = bool(self._written)
        self.close()
        return counts

    def close(self) -> None:
        """End the step that is under way."""
        self.steps, self.since, _ = self.now()
        self._written.clear()
        self._skipped.clear()

    def now(self) -> tuple[int, int, int]:
        """Return steps, those since the last sync, and syncs, with the step that is under way."""
        more = 1 if self._written else 0
        return self.steps + more, self.since + more, self.syncs

    def load(self, counts: Sequence[float] | None) -> None:
        """Continue from saved counts, and `seen`; None: the ranks have equal parameters now."""
        self._written.clear()
        counts, self.weight = counts or (self.steps, 0, self.syncs), None
        self.steps, self.since, self.syncs = map(int, counts[:3])
        self.seen = next(iter(counts[3:]), None)
