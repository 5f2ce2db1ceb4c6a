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
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.compression.compressor import (
    FORGET,
    Compressor,
    Feedback,
    Gather,
    Mean,
    Part,
    Request,
    Rounds,
    Swap,
    check_floating,
    generator,
    narrowed,
    wide,
)
from phalanx.compression.memory import Bundle, Remembers, Turns


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


# ------------------------------------------------------------------------------
# Casts: gradients travel in a dtype of 16 bits.


@dataclass(frozen=True, eq=False)
class Cast:
    """A message: the tensor in another dtype."""

    values: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return self.values.nbytes


class Half(Compressor):
    """Gradients as float16 or bfloat16: 2 bytes a value, and one all-reduce.

    dtype   `torch.bfloat16`: values of any size, to 8 bits; `torch.float16`: to 11 bits, of up to
            65504 / (p + 1), which larger ones are sent as, so that the sum over p parts is finite

    The sum is in that dtype, too, as the backend sums it. With error feedback, from which nothing
    may be lost, it is in float32 instead, on the owner of a slice, which keeps what it rounds off
    the mean: as many bytes, an all-to-all and an all-gather.

    Where each part needs a shard only, its owner gets all parts' values, and sums them in float32:
    (p-1)/p of the bytes, nothing is rounded twice, and float16 takes values of up to 65504.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Half casts to torch.float16 or torch.bfloat16, not {dtype}")
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Half({self.dtype})"

    def compress(self, tensor: Tensor) -> Cast:
        """The tensor, rounded to nearest."""
        check_floating(tensor, self)
        return Cast(narrowed(tensor.detach(), self.dtype), tensor.dtype)

    def decompress(self, message: Cast) -> Tensor:
        """The rounded tensor, in its former dtype."""
        return message.values.to(message.dtype, copy=True)

    def average_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-reduce of 2 bytes a value; two with feedback."""
        n = len(bundle.flat)
        if n == 0:
            return
        if feedback is FORGET:
            bundle.flat.copy_((yield Mean(narrowed(bundle.flat, self.dtype, part.parts).clone())))
            return
        mean = yield from self._mean_of_slice(bundle, part, feedback)
        start = min(n, part.number * len(mean))
        size = min(n, start + len(mean)) - start  # the last slices may be shorter, or empty
        owned = feedback.recall_owned(bundle, start, mean[:size])
        again = narrowed(owned, self.dtype)
        feedback.keep_owned(bundle, start, lambda: owned - again.to(owned.dtype))
        gathered = yield Gather(torch.nn.functional.pad(again, (0, len(mean) - size)))
        bundle.flat.copy_(gathered.flatten()[:n])

    def average_shard_(self, bundle: Bundle, part: Part, feedback: Feedback = FORGET) -> Rounds:
        """One round, an all-to-all of 2 bytes a value."""
        if bundle.size == 0:
            return
        mean = yield from self._mean_of_slice(bundle, part, feedback)
        bundle.shards(part.parts)[part.number].copy_(mean)

    def _mean_of_slice(
        self, bundle: Bundle, part: Part, feedback: Feedback
    ) -> Generator[Request, Tensor, Tensor]:
        """Of one of as many slices as there are parts, the last ones padded; float32 or wider."""
        p, length = part.parts, -(-len(bundle.flat) // part.parts)
        wanted = feedback.recall(bundle, part)
        sent = narrowed(wanted, self.dtype)
        feedback.keep(bundle, lambda: wanted.sub_(sent))
        padded = torch.nn.functional.pad(sent, (0, p * length - len(sent)))
        rows = yield Swap(padded.view(p, length))
        total = torch.zeros(length, dtype=wide(wanted.dtype), device=wanted.device)
        for theirs in rows:
            total += theirs
        return total.div_(p)


# ------------------------------------------------------------------------------
# Blocks of values that share a scale, and their bytes.
#
# a row on the wire   [ scales, float32 | codes of `bits` each, the first in the lowest bits ]
#
# bits   codes        a code c of scale s stands for   s, rounding at random   s, to nearest
# 8      -127..127    c * s                            largest / 127           largest / 127
# 4      -7..7        c * s                            largest / 7             largest / 7
# 1      0, 1         -s, s                            largest                 mean magnitude


class Blocks(NamedTuple):
    """How rows of `length` values are cut into blocks of `block` (the last one may be shorter)."""

    bits: int
    block: int
    length: int

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.length // self.block)

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return 4 * self.blocks + bytes_for(self.bits * self.length)

    def pack(self, rows: Tensor, noise: Tensor | None) -> Tensor:
        """`[n, length]` values as `[n, nbytes]` uint8.

        noise   uniform in [0, 1), like `rows`: what is added before rounding down; None: to nearest
        """
        cut = self._cut(rows)
        magnitudes = cut.abs()
        if self.bits == 1 and noise is None:
            padded = self.blocks * self.block - self.length
            sizes = torch.full((self.blocks,), float(self.block), device=rows.device)
            if self.blocks:
                sizes[-1] -= padded
            scales = magnitudes.sum(-1) / sizes
        else:
            scales = magnitudes.amax(-1) / _MOST[self.bits]
        scales = scales.float()
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        units = cut / torch.where(scales == 0, 1, scales).unsqueeze(-1).to(cut.dtype)
        spread = self._cut(noise) if noise is not None else None
        codes = self._codes(units, spread).flatten(-2)[..., : self.length]
        return torch.cat([scales.contiguous().view(torch.uint8), self._packed(codes)], dim=-1)

    def unpack(self, packed: Tensor) -> Tensor:
        """`[n, nbytes]` as `[n, length]` float32."""
        split = 4 * self.blocks
        scales = packed[..., :split].flatten().clone().view(torch.float32)
        codes = self._cut(self._unpacked(packed[..., split:]).float())
        values = codes * scales.view(*codes.shape[:-1], 1)
        return values.flatten(-2)[..., : self.length]

    def _cut(self, rows: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(rows, (0, self.blocks * self.block - self.length))
        return padded.view(*rows.shape[:-1], self.blocks, self.block)

    def _codes(self, units: Tensor, noise: Tensor | None) -> Tensor:
        """Rounded units; at 1 bit, whether they are positive."""
        most = _MOST[self.bits]
        if self.bits == 1:
            return (units >= 0) if noise is None else (noise < (units + 1) / 2)
        rounded = units.round() if noise is None else (units + noise).floor()
        return rounded.nan_to_num_(0).clamp_(-most, most).to(torch.int8)

    def _packed(self, codes: Tensor) -> Tensor:
        if self.bits == 1:
            return pack_bits(codes)
        if self.bits == 8:
            return codes.contiguous().view(torch.uint8)
        halves = torch.nn.functional.pad(codes + 7, (0, codes.shape[-1] % 2)).to(torch.uint8)
        return halves[..., 0::2] | halves[..., 1::2] << 4

    def _unpacked(self, packed: Tensor) -> Tensor:
        if self.bits == 1:
            return unpack_bits(packed, self.length).to(torch.int8) * 2 - 1
        if self.bits == 8:
            return packed.contiguous().view(torch.int8)
        halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        return halves[..., : self.length].to(torch.int8) - 7


_MOST: Mapping[int, int] = MappingProxyType({8: 127, 4: 7, 1: 1})


# ------------------------------------------------------------------------------
# Bits as bytes, the first bit the lowest of the first byte; and numbers of a few bits each.


def pack_bits(bits: Tensor) -> Tensor:
    """`[..., n]` of 0 and 1, uint8 or bool, as `[..., ceil(n / 8)]` uint8; the rest is zeros."""
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8))
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (eights.view(*eights.shape[:-1], -1, 8) * powers).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits, as `[..., count]` uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).flatten(-2)[..., :count]


def bits_of(numbers: Tensor, width: int) -> Tensor:
    """`[n]` integers, 0 <= number < 2**width, as `[n * width]` bits, uint8."""
    places = torch.arange(width, device=numbers.device)
    return (numbers.long().unsqueeze(-1) >> places & 1).flatten().to(torch.uint8)


def numbers_of(bits: Tensor, width: int, count: int) -> Tensor:
    """`[count * width]` bits as `[count]` integers, int64."""
    places = torch.arange(width, device=bits.device)
    return (bits.view(count, width).long() << places).sum(-1, dtype=torch.int64)


def bytes_for(bits: int) -> int:
    """How many bytes that many bits take."""
    return (bits + 7) // 8
