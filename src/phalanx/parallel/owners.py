"""Owners: of each parameter of a `ShardedOptimizer`, the one rank that steps on it.

    rank 0   gradients of a b c              mean of a     step a            a b c
                                 reduce                          broadcast
    rank 1   gradients of a b c              mean of b c   step b c          a b c

A wrapper knows them: it lets gradients go to owners, and each optimizer step on what it has only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch import Tensor, nn

from phalanx.parallel.averaging import Bucket
from phalanx.parallel.gradient_parts import mark_part


class OwnedGradients:
    """The gradients that a DDP averages for their owners alone, on this rank.

    A backward pass may add to means of an earlier one, which only the owner has. Of p ranks it
    sends p mean + own, and the others their own: of these the mean is the sum of both means.

    earlier   copies of the means to which passes are adding
    """

    def __init__(self, rank_of: Mapping[nn.Parameter, int], rank: int) -> None:
        self.rank_of: Mapping[Tensor, int] = rank_of  # type: ignore[assignment]
        self._mine = [p for p, owner in rank_of.items() if owner == rank]
        self._rank = rank
        self._place: dict[Tensor, int] = {}  # the memory of each mean that is in `.grad`
        self.earlier: dict[Tensor, Tensor] = {}

    def begin_pass(self, added: Set[Tensor]) -> None:
        """Remember means before a pass adds to them, but to those `added` to since, by no_sync."""
        for parameter in self._mine:
            grad = parameter.grad
            if grad is None or grad.data_ptr() != self._place.get(parameter):
                self._place.pop(parameter, None)
                self.earlier.pop(parameter, None)
            elif parameter not in added:
                self.earlier[parameter] = grad.clone()

    def knows_mean_in(self, parameter: Tensor) -> bool:
        """Return whether it is known how much of a gradient is an earlier mean, perhaps nothing."""
        place, grad = self._place.get(parameter), parameter.grad
        return parameter in self.earlier or grad is None or grad.data_ptr() != place

    def add_earlier_(self, parameter: Tensor, gradient: Tensor, ranks: int) -> None:
        """Add what the other ranks lack to a gradient that contains an earlier mean."""
        if (earlier := self.earlier.pop(parameter, None)) is not None:
            gradient.add_(earlier, alpha=ranks - 1)

    def end_pass(self, buckets: Iterable[Bucket]) -> None:
        """Leave each mean with its owner: on the others, `.grad` becomes None."""
        self.earlier.clear()
        for parameter, view in [item for bucket in buckets for item in bucket.views.items()]:
            owner = self.rank_of.get(parameter)
            if owner == self._rank:
                self._place[parameter] = view.data_ptr()
                mark_part(parameter)
            elif owner is not None:
                parameter.grad = None
