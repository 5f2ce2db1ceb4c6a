"""Random-k: a few values of a gradient, at places that all parts draw alike, so no index is sent.

(Stich et al. 2018.) The places are drawn one from each of k equal runs of the gradient, which is as
good and takes no shuffle:

    n = 8, k = 3   [ . . x | . x . | x . ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.compression.bundle import Bundle
from phalanx.compression.compressor import Compressor, check_floating, narrowed, wide
from phalanx.compression.draws import generator
from phalanx.compression.exchange import Mean, Part, Rounds
from phalanx.compression.feedback import FORGET, Feedback
from phalanx.compression.finite import is_finite
from phalanx.compression.memory import Remembers, Turns
from phalanx.compression.top_k import checked_ratio, kept, without_


@dataclass(frozen=True, eq=False)
class RandomValues:
    """A message: values, and the number of the draw that says where they stand."""

    values: Tensor
    draw: int
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Of the values: receivers count draws, too."""
        return self.values.nbytes


class RandomK(Compressor):
    """`ceil(ratio * n)` values of n, at places that are drawn anew for each average.

    ratio   0 <= ratio <= 1; at least one value, if there is one
    seed    the same on every part

    It sends what it has drawn as it is, not n/k times as much: with error feedback nothing is
    missing in the end, without it gradients are too small. Averages are all-reduced.
    """

    def __init__(self, ratio: float, *, seed: int = 0) -> None:
        self.ratio = checked_ratio(ratio)
        self.seed = seed
        self._turns = Turns()

    def __repr__(self) -> str:
        return f"RandomK({self.ratio}, seed={self.seed})"

    def compress(self, tensor: Tensor) -> RandomValues:
        """The next draw's values."""
        check_floating(tensor, self)
        draw, flat = self._turns.next(), tensor.detach().reshape(-1)
        return RandomValues(flat[self._places(flat, draw)], draw, tensor.shape)

    def decompress(self, message: RandomValues) -> Tensor:
        """Zeros but for those values."""
        dense = message.values.new_zeros(message.shape.numel())
        dense[self._places(dense, message.draw)] = message.values
        return dense.view(message.shape)

    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-reduce of k values."""
        flat = bundle.flat
        if len(flat) == 0:
            return
        wanted = feedback.recall(bundle, part)
        places = self._places(flat, self._turns.next())
        parts = 1 if flat.dtype is wide(flat.dtype) else part.parts
        values = narrowed(wanted[places], flat.dtype, parts)
        finite = is_finite(wanted)
        feedback.keep(bundle, lambda: without_(wanted, places, values))
        # What is not finite may be at places that are not drawn.
        mean = yield Mean(values.clone() if finite else torch.full_like(values, torch.nan))
        flat.zero_()
        flat[places] = mean

    def remembers(self) -> Mapping[str, Remembers]:
        """How often it has drawn."""
        return {"draws": self._turns}

    def _places(self, flat: Tensor, draw: int) -> Tensor:
        """One from each run, int64, ascending."""
        n, device = len(flat), flat.device
        k = kept(n, self.ratio)
        edges = torch.arange(k + 1, device=device) * n // max(k, 1)
        chance = torch.rand(
            k,
            dtype=torch.float64,
            device=device,
            generator=generator("random-k", self.seed, draw, device=device),
        )
        starts, lengths = edges[:-1], edges.diff()
        return starts + (chance * lengths).long().minimum(lengths - 1)
