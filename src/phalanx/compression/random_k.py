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
from phalanx.compression.exchange import Mean, MeanShard, Part, Rounds
from phalanx.compression.feedback import FORGET, Feedback
from phalanx.compression.finite import is_finite
from phalanx.compression.memory import Remembers, Turns
from phalanx.compression.top_k import checked_ratio, kept


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
    missing in the end, without it gradients are too small. Averages are all-reduced; where each
    part needs a shard only, equally many places are drawn in each, and their values
    reduce-scattered.
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
        return RandomValues(flat[self._places(flat, draw, 1)], draw, tensor.shape)

    def decompress(self, message: RandomValues) -> Tensor:
        """Zeros but for those values."""
        dense = message.values.new_zeros(message.shape.numel())
        dense[self._places(dense, message.draw, 1)] = message.values
        return dense.view(message.shape)

    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-reduce of k values."""
        flat = bundle.flat
        if len(flat) == 0:
            return
        places, values = self._drawn(bundle, part, feedback, 1)
        mean = yield Mean(values)
        flat.zero_()
        flat[places] = mean

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, a reduce-scatter of equally many values of each shard."""
        if bundle.size == 0:
            return
        parts, shard = part.parts, bundle.shards(part.parts)[part.number]
        places, values = self._drawn(bundle, part, feedback, parts)
        mean = yield MeanShard(values.view(parts, -1))
        shard.zero_()
        shard[places.view(parts, -1)[part.number] - part.number * len(shard)] = mean

    def _drawn(
        self, bundle: Bundle, part: Part, feedback: Feedback, shards: int
    ) -> tuple[Tensor, Tensor]:
        """The next draw's places, and a copy of this part's values there, as they travel."""
        flat = bundle.flat
        wanted = feedback.recall(bundle, part)
        places = self._places(flat, self._turns.next(), shards)
        parts = 1 if flat.dtype is wide(flat.dtype) else part.parts
        values = narrowed(wanted[places], flat.dtype, parts)
        finite = is_finite(wanted)

        def rest() -> Tensor:
            wanted[places] -= values.to(wanted.dtype)
            return wanted

        feedback.keep(bundle, rest)
        if not finite:  # at places that are not drawn, perhaps
            return places, torch.full_like(values, torch.nan)
        return places, values.clone()

    def remembers(self) -> Mapping[str, Remembers]:
        """How often it has drawn."""
        return {"draws": self._turns}

    def _places(self, flat: Tensor, draw: int, shards: int) -> Tensor:
        """One from each run, int64, ascending; of equal shards equally many."""
        n, device = len(flat), flat.device
        k = shards * kept(n // shards, self.ratio)
        edges = torch.arange(k + 1, device=device) * n // max(k, 1)
        chance = torch.rand(
            k,
            dtype=torch.float64,
            device=device,
            generator=generator("random-k", self.seed, draw, device=device),
        )
        starts, lengths = edges[:-1], edges.diff()
        return starts + (chance * lengths).long().minimum(lengths - 1)
