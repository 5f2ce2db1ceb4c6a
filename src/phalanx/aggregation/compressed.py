"""The average of compressed gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from phalanx.aggregation.aggregator import GradientAggregator, checked
from phalanx.aggregation.agreement import check_same_list
from phalanx.aggregation.exchange import Exchange
from phalanx.aggregation.flat import cut_like, numbers_by_kind
from phalanx.aggregation.saved import load_own, own_state
from phalanx.backends.base import Backend
from phalanx.compression import Compressor
from phalanx.compression.bundle import Bundle
from phalanx.compression.compressor import check_compressor, check_floating
from phalanx.compression.exchange import Part
from phalanx.compression.finite import is_finite
from phalanx.compression.residuals import RESIDUAL
from phalanx.errors import SizeMismatchError


class CompressedAggregator(GradientAggregator):
    """The mean over the ranks of a backend, of which messages are compressed.

    compressor   `ErrorFeedback(TopK(0.01))`, `PowerSGD(4)`, ...; a copy is made, `.compressor`, so
                 that one may be given to many

    All gradients of a dtype are compressed together (top-k takes the largest of all of them);
    matrices keep their shapes. A gradient is known to the compressor by its number in the list:
    always give those of the same parameters (under error feedback, `SizeMismatchError` on every
    rank for another shape than before). Raises `DesyncError` on every rank, naming the first
    gradient that differs, before anything is summed; `UnsupportedOperationError`, before anything
    is sent, for dtypes that cannot be compressed.

    Where averages are not finite they are returned so, and the compressor's state stays as it was:
    such a step is skipped. So it does if a call fails.
    """

    backend: Backend

    def __init__(self, backend: Backend, compressor: Compressor) -> None:
        check_compressor(compressor, "CompressedAggregator")
        self.backend = backend
        self.compressor = deepcopy(compressor)
        self._exchange = Exchange(backend)
        self._shapes: dict[int, torch.Size] = {}  # of what something may be left over of

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""
        return self._exchange.bytes_sent

    @torch.no_grad()
    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The means, new tensors."""
        listed = checked(gradients, "CompressedAggregator", self.backend)
        for number, gradient in enumerate(listed):
            which = f"rank {self.backend.rank}: gradient {number}: {self.compressor}"
            check_floating(gradient, which)
        who = f"CompressedAggregator({self.compressor!r})"
        check_same_list(listed, self.backend, who)
        self._check_shapes(listed)
        groups = numbers_by_kind(listed)
        bundles = [
            Bundle.of([listed[n] for n in numbers], [*map(str, numbers)]) for numbers in groups
        ]
        part = Part(self.backend.rank, self.backend.world_size)
        try:
            under_way = [
                self._exchange.begin(self.compressor.average_(bundle, part), who)
                for bundle in bundles
            ]
            self._exchange.finish(under_way)
        except BaseException:
            self.compressor.rollback()
            raise
        if all(is_finite(bundle.flat) for bundle in bundles):
            self.compressor.commit()
            self._shapes.update((number, g.shape) for number, g in enumerate(listed))
        else:
            self.compressor.rollback()
        results: dict[int, Tensor] = {}
        for numbers, bundle in zip(groups, bundles, strict=True):
            same = [listed[number] for number in numbers]
            results.update(zip(numbers, cut_like(bundle.flat, same), strict=True))
        return [results[number] for number in range(len(listed))]

    def state_dict(self) -> dict[str, Tensor]:
        """What the compressor remembers on this rank, under keys that say which rank it is:
        `compression@<rank>/<ranks>.<key>`. Those of all ranks may be joined into one dict.
        """
        return own_state(self.compressor, self.backend)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from states that were saved by any number of ranks, joined into one dict.

        For as many ranks as before, each needs its own only; else all of them are needed. A warning
        in the log says which ones are missing: what these had left over is lost. Nothing is sent.
        """
        load_own(self.compressor, state, self.backend)
        self._shapes.clear()

    def _check_shapes(self, listed: Sequence[Tensor]) -> None:
        """Refuse gradients in another order: others' leavings would be added to them."""
        if RESIDUAL not in self.compressor.remembers():
            return
        for number, gradient in enumerate(listed):
            before = self._shapes.get(number, gradient.shape)
            if before != gradient.shape:
                rank = self.backend.rank
                raise SizeMismatchError(
                    f"rank {rank}: {self.compressor}: gradient {number} has the shape "
                    f"{list(gradient.shape)}, and what is left over is of one of {list(before)}: "
                    "give the gradients of the same parameters in the same order in every call, or "
                    "make a new aggregator for others",
                    rank=rank,
                    op="aggregate",
                )
