"""Quantization: 8, 4 or 1 bits a value and a scale for each block, averaged in two shots.

    part 0   [ a0 | b0 ]        a = mean(a0, a1)        [ a | b ]
                        swap                     gather
    part 1   [ a1 | b1 ]        b = mean(b0, b1)        [ a | b ]

Every slice is quantized once by each part, summed in float32 by its owner, and quantized once
more: twice in all, whatever the number of parts, where a ring would do so at every hop. Stochastic
rounding makes it unbiased (Alistarh et al. 2017, "QSGD"). With error feedback, which keeps what is
left out in both shots, 1 bit is enough (Seide et al. 2014; Karimireddy et al. 2019; Tang et al.
2021, "1-bit Adam").
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.compression.blocks import Blocks
from phalanx.compression.bundle import Bundle
from phalanx.compression.compressor import Compressor, check_floating, wide
from phalanx.compression.draws import generator
from phalanx.compression.exchange import Gather, Part, Request, Rounds, Swap
from phalanx.compression.feedback import FORGET, Feedback
from phalanx.compression.memory import Remembers, Turns


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A message: scales and codes, as they are on the wire."""

    packed: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of 4 bytes for each block, and `bits` for each value, rounded up to bytes."""
        return self.packed.nbytes


class Quantized(Compressor):
    """Values as multiples of a scale of their block.

    bits        8: -127 to 127 times largest / 127; 4: -7 to 7 times largest / 7; 1: a sign times
                the scale
    block       values that share a scale
    stochastic  round up or down at random, so that the mean over many times is the value; at 1 bit
                the scale is the block's largest value then. Else round to nearest; at 1 bit the
                scale is the mean magnitude. None: stochastic, but under error feedback, which makes
                up for a bias and wants small errors, to nearest
    seed        of the random numbers, which differ for each call and part

    An average sends (p-1)/p of the quantized gradients twice from each of p parts; once, where each
    part needs a shard only: then the first shot is all there is. A block with a value that is not
    finite, or too large for float32, becomes NaN, whole. Raises ValueError for other numbers of
    bits, and for stochastic rounding to 1 bit under error feedback: its errors grow without bound
    there.
    """

    def __init__(
        self,
        bits: int = 8,
        *,
        block: int = 256,
        stochastic: bool | None = None,
        seed: int = 0,
    ) -> None:
        if type(bits) is not int or bits not in (8, 4, 1):
            raise ValueError(f"Quantized has 8, 4 or 1 bits for a value, not {bits}")
        if not isinstance(block, int) or block < 1:
            raise ValueError(f"a block is a number of values, at least 1, not {block!r}")
        if stochastic not in (None, True, False):
            raise ValueError(f"stochastic is True, False or None, not {stochastic!r}")
        self.bits, self.block, self.stochastic, self.seed = bits, block, stochastic, seed
        self._turns = Turns()

    def __repr__(self) -> str:
        return (
            f"Quantized(bits={self.bits}, block={self.block}, stochastic={self.stochastic}, "
            f"seed={self.seed})"
        )

    def contraction(self) -> Compressor:
        """The same with rounding to nearest, unless it was asked for another."""
        if self.bits == 1 and self.stochastic:
            raise ValueError(
                "stochastic rounding to 1 bit leaves out more than there is, and error feedback "
                "would add that up: leave out stochastic=True"
            )
        stochastic = bool(self.stochastic)
        return Quantized(self.bits, block=self.block, stochastic=stochastic, seed=self.seed)

    def compress(self, tensor: Tensor) -> QuantizedTensor:
        """The tensor's blocks, read row by row; the last one may be shorter."""
        check_floating(tensor, self)
        row = tensor.detach().reshape(1, -1).to(wide(tensor.dtype))
        packed = self._blocks(row.shape[1]).pack(row, self._noise(row, self._turns.next()))
        return QuantizedTensor(packed[0], tensor.shape, tensor.dtype)

    def decompress(self, message: QuantizedTensor) -> Tensor:
        """The rounded values."""
        blocks = self._blocks(message.shape.numel())
        return blocks.unpack(message.packed[None])[0].to(message.dtype).view(message.shape)

    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """Two rounds: slices to their owners, means of slices to everybody."""
        n = len(bundle.flat)
        if n == 0:
            return
        turn = self._turns.next()
        mean = yield from self._first_shot(bundle, part, feedback, turn)
        length = len(mean)
        blocks = self._blocks(length)
        start = min(n, part.number * length)
        size = min(n, start + length) - start  # the last slices may be shorter, or empty
        owned = torch.zeros(1, length, dtype=mean.dtype, device=mean.device)
        owned[0, :size] = feedback.recall_owned(bundle, start, mean[:size])
        again = blocks.pack(owned, self._noise(owned, turn, part.number, "owned"))
        feedback.keep_owned(bundle, start, lambda: (owned - blocks.unpack(again))[0, :size])
        gathered = yield Gather(again[0])
        bundle.flat.copy_(blocks.unpack(gathered).flatten()[:n])

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round: shards to their owners. What a part keeps is not quantized again."""
        if bundle.size == 0:
            return
        mean = yield from self._first_shot(bundle, part, feedback, self._turns.next())
        bundle.shards(part.parts)[part.number].copy_(mean)

    def _first_shot(
        self, bundle: Bundle, part: Part, feedback: Feedback, turn: int
    ) -> Generator[Request, Tensor, Tensor]:
        """The mean of this part's slice, `[length]`, float32 or wider. Slices are of one length;
        the last ones may reach beyond the bundle, where there are zeros, of which 1 bit makes
        something, which is cut off by whoever cuts the bundle.
        """
        n, p = len(bundle.flat), part.parts
        wanted = feedback.recall(bundle, part)
        wanted = wanted.to(wide(wanted.dtype))
        length = -(-n // p)
        blocks = self._blocks(length)
        slices = torch.nn.functional.pad(wanted, (0, p * length - n)).view(p, length)
        packed = blocks.pack(slices, self._noise(slices, turn, part.number, "given"))
        feedback.keep(bundle, lambda: wanted.sub_(blocks.unpack(packed).flatten()[:n]))
        swapped = yield Swap(packed)
        mean = torch.zeros(length, dtype=wanted.dtype, device=wanted.device)
        for theirs in swapped:
            mean += blocks.unpack(theirs[None])[0]
        return mean.div_(p)

    def remembers(self) -> Mapping[str, Remembers]:
        """How often it has drawn noise."""
        return {"calls": self._turns}

    def _blocks(self, length: int) -> Blocks:
        return Blocks(self.bits, self.block, length)

    def _noise(self, like: Tensor, *what: object) -> Tensor | None:
        """Uniform in [0, 1), one for each value; None to round to nearest."""
        if self.stochastic is False:
            return None
        device = like.device
        drawn = generator("quantized", self.seed, *what, device=device)
        return torch.rand(like.shape, dtype=like.dtype, device=device, generator=drawn)
