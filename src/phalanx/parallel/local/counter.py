"""How many steps a rank has taken by itself, as its optimizers tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from phalanx.parallel.local.writes import Writes


class Counts(NamedTuple):
    """How far a rank is.

    steps      of optimizers, in all
    since      of these since the ranks last met
    meetings   how many
    """

    steps: int
    since: int
    meetings: int


class StepCounter:
    """Counts a module's steps.

    trained  the parameters whose writing is a step, by name
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self.counts = Counts(0, 0, 0)
        self._trained = frozenset(trained.values())
        self._writes = Writes(trained.values())

    def before(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to write: whether a step is over by that."""
        over = self._writes.before(self.written_by(optimizer))
        return self._count() if over else False

    def after(self, optimizer: Optimizer) -> bool:
        """It has: whether a step is over by that."""
        over = self._writes.after(self.written_by(optimizer))
        return self._count() if over else False

    def written_by(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Those of the parameters that it has."""
        return [p for g in optimizer.param_groups for p in g["params"] if p in self._trained]

    def close(self) -> None:
        """A step that is under way is over."""
        if self._writes.begun:
            self._writes.close()
            self._count()

    def met(self) -> None:
        """The ranks have met."""
        self.counts = self.counts._replace(since=0, meetings=self.counts.meetings + 1)

    def now(self) -> Counts:
        """The counts, a step that is under way included."""
        return _one_more(self.counts) if self._writes.begun else self.counts

    def go_on_from(self, counts: Counts | None) -> None:
        """From saved counts; None: the ranks are alike now."""
        self._writes.close()
        self.counts = counts or self.counts._replace(since=0)

    def _count(self) -> bool:
        self.counts = _one_more(self.counts)
        return True


def _one_more(counts: Counts) -> Counts:
    return Counts(counts.steps + 1, counts.since + 1, counts.meetings)
