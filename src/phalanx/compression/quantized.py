"""Averages in two rounds, of values in fewer bits: casts to 16 bits, and quantization to 8, 4 or 1.

    member 0   [ a0 | b0 ]               a = mean(a0, a1)             [ a | b ]
                           all-to-all                     all-gather
    member 1   [ a1 | b1 ]               b = mean(b0, b1)             [ a | b ]

Every slice is quantized once by each member, summed in float32 by its owner, and quantized once
more: twice in all for any number of members; a ring would do so at every hop. Stochastic rounding
makes it unbiased (Alistarh et al. 2017, "QSGD"). With error feedback, which keeps the errors of
both rounds, 1 bit is enough (Seide et al. 2014; Karimireddy et al. 2019; Tang et al. 2021, "1-bit
Adam").
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx.compression.compressor import (
    NO_RESIDUALS,
    AllGather,
    AllReduceMean,
    AllToAll,
    CallCounter,
    Compressor,
    EncodedTensor,
    GradientBucket,
    Member,
    Request,
    ResidualStore,
    Rounds,
    check_floating,
    generator,
    narrowed,
    wide,
)


class TwoRounds(Compressor):
    """Averages by an all-to-all of slices and an all-gather of their means, both encoded.

    Slices are of one length; the last ones may reach beyond the bucket into zeros, whose encoding
    is cut off.
    """

    def __init__(self) -> None:
        self._calls = CallCounter()

    @abstractmethod
    def _encode(self, rows: Tensor, *call: object) -> Tensor:
        """Return `[n, length]` values as they are sent, row by row; `call` seeds random numbers."""

    @abstractmethod
    def _decode(self, rows: Tensor, length: int) -> Tensor:
        """Return the values, `[n, length]`."""

    def compress(self, tensor: Tensor) -> EncodedTensor:
        """Return the tensor's values, rounded, as one row: 1-D."""
        check_floating(tensor, self)
        row = self._encode(tensor.detach().reshape(1, -1), self._calls.next())[0]
        return EncodedTensor((row,), tensor.shape, tensor.dtype)

    def decompress(self, message: EncodedTensor) -> Tensor:
        """Return the rounded tensor, in its former dtype."""
        values = self._decode(message.sent[0][None], message.shape.numel())[0]
        return values.to(message.dtype, copy=True).view(message.shape)

    def average_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Average in two rounds: slices to their owners, means of slices to everybody."""
        n = len(bucket.flat)
        if n == 0:
            return
        call = self._calls.next()
        mean = yield from self._mean_of_slice(bucket, member, feedback, call)
        length = len(mean)
        start = min(n, member.number * length)
        size = min(n, start + length) - start  # the last slices may be shorter, or empty
        owned = feedback.add_owned_residual(bucket, start, mean[:size])
        owned = _padded(owned, length).view(1, length)
        sent = self._encode(owned, call, member.number, "owned")
        feedback.store_owned_residual(
            bucket, start, lambda: (owned - self._decode(sent, length))[0, :size]
        )
        gathered = yield AllGather(sent[0])
        bucket.flat.copy_(self._decode(gathered, length).flatten()[:n])

    def average_shard_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Average in one round: shards to their owners, which keep the mean unrounded."""
        if bucket.size == 0:
            return
        call = self._calls.next()
        mean = yield from self._mean_of_slice(bucket, member, feedback, call)
        bucket.shards(member.parts)[member.number].copy_(mean)

    def _mean_of_slice(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore, call: int
    ) -> Generator[Request, Tensor, Tensor]:
        """Run the first round: return the mean of this member's slice, `[length]`, >= float32."""
        n, p = len(bucket.flat), member.parts
        length = -(-n // p)
        wanted = feedback.add_residual(bucket, member)
        slices = _padded(wanted, p * length).view(p, length)
        sent = self._encode(slices, call, member.number, "given")
        feedback.store_residual(
            bucket, lambda: wanted.sub_(self._decode(sent, length).flatten()[:n])
        )
        received = yield AllToAll(sent)
        total = torch.zeros(length, dtype=wide(wanted.dtype), device=wanted.device)
        for row in received:
            total += self._decode(row[None], length)[0]
        return total.div_(p)


def _padded(values: Tensor, length: int) -> Tensor:
    """Return `[n]` as `[length]`, with zeros at the end; itself, if it is as long."""
    return pad(values, (0, length - len(values))) if len(values) < length else values


# ------------------------------------------------------------------------------
# Casts: gradients are sent in a dtype of 16 bits.


class Half(TwoRounds):
    """Gradients as float16 or bfloat16: 2 bytes a value, and one all-reduce.

    dtype   `torch.bfloat16`: values of any size, to 8 bits; `torch.float16`: to 11 bits, of up to
            65504 / (p + 1), which larger ones are sent as, so that the sum over p members is finite

    The sum is in that dtype, too, as the backend sums it. With error feedback, from which nothing
    may be lost, it is in float32 instead, on the owner of a slice, which keeps the mean's rounding
    errors: as many bytes, an all-to-all and an all-gather.

    If each member needs a shard only, its owner gets all members' values, and sums them in float32:
    (p-1)/p of the bytes, nothing is rounded twice, and float16 takes values of up to 65504.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Half casts to torch.float16 or torch.bfloat16, not {dtype}")
        super().__init__()
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Half({self.dtype})"

    def average_(
        self, bucket: GradientBucket, member: Member, feedback: ResidualStore = NO_RESIDUALS
    ) -> Rounds:
        """Average by one all-reduce of 2 bytes a value; in two rounds with error feedback."""
        if feedback is not NO_RESIDUALS or len(bucket.flat) == 0:
            yield from super().average_(bucket, member, feedback)
            return
        sent = narrowed(bucket.flat, self.dtype, member.parts).clone()
        bucket.flat.copy_((yield AllReduceMean(sent)))

    def _encode(self, rows: Tensor, *call: object) -> Tensor:
        return narrowed(rows, self.dtype)

    def _decode(self, rows: Tensor, length: int) -> Tensor:
        return rows


# ------------------------------------------------------------------------------
# Quantization to blocks of 8, 4 or 1 bits a value, with a scale for each block.
#
# a row on the wire   [ scales, float32 | codes of `bits` each, the first in the lowest bits ]


class Quantized(TwoRounds):
    """Values as multiples of a scale of their block.

    bits        8: -127 to 127 times largest / 127; 4: -7 to 7 times largest / 7; 1: a sign times
                the scale
    block       values that share a scale; a message is 4 bytes for each block, of which the last
                may be shorter, and `bits` for each value
    stochastic  round up or down at random, so that the mean over many times is the value; at 1 bit
                the scale is the block's largest value then. Else round to nearest; at 1 bit the
                scale is the mean magnitude. None: stochastic, but under error feedback, which makes
                up for a bias and wants small errors, to nearest
    seed        of the random numbers, which differ for each call and member

    An average sends (p-1)/p of the quantized gradients twice from each of p members; once, in the
    first round alone, if each needs a shard only. A block with a value that is not finite, or too
    large for float32, becomes NaN, whole. Raises ValueError for other numbers of bits, and for
    stochastic rounding to 1 bit under error feedback: errors would grow unbounded.
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
        super().__init__()
        self.bits, self.block, self.stochastic, self.seed = bits, block, stochastic, seed

    def __repr__(self) -> str:
        return (
            f"Quantized(bits={self.bits}, block={self.block}, stochastic={self.stochastic}, "
            f"seed={self.seed})"
        )

    def contraction(self) -> Compressor:
        """Return the same compressor, rounding to nearest unless it was told otherwise."""
        if self.bits == 1 and self.stochastic:
            raise ValueError(
                "stochastic rounding to 1 bit leaves out more than there is, and error feedback "
                "would add that up: leave out stochastic=True"
            )
        stochastic = bool(self.stochastic)
        return Quantized(self.bits, block=self.block, stochastic=stochastic, seed=self.seed)

    def remembers(self) -> Mapping[str, CallCounter]:
        """Return the counter of its draws of random numbers."""
        return {"calls": self._calls}

    def _encode(self, rows: Tensor, *call: object) -> Tensor:
        """Return `[n, length]` values as `[n, bytes]` uint8: 4 for a block, `bits` for a value."""
        rows, length = rows.to(wide(rows.dtype)), rows.shape[1]
        most = max(1, 2 ** (self.bits - 1) - 1)  # the largest code: 127, 7; 1 for a sign
        noise = None
        if self.stochastic is not False:  # uniform in [0, 1), added before rounding down
            drawn = generator("quantized", self.seed, *call, device=rows.device)
            uniform = torch.rand(rows.shape, dtype=rows.dtype, device=rows.device, generator=drawn)
            noise = self._blocks(uniform)
        cut = self._blocks(rows)
        if self.bits == 1 and noise is None:
            sizes = torch.full((cut.shape[1],), float(self.block), device=rows.device)
            if length:
                sizes[-1] -= cut.shape[1] * self.block - length
            scales = cut.abs().sum(-1) / sizes
        else:
            scales = torch.maximum(cut.amax(-1), cut.amin(-1).abs()) / most
        scales = scales.float()
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        units = cut / torch.where(scales == 0, 1, scales).unsqueeze(-1).to(cut.dtype)
        if self.bits == 1:  # whether they are positive
            codes = (units >= 0) if noise is None else (noise < (units + 1) / 2)
        else:
            rounded = units.round_() if noise is None else units.add_(noise).floor_()
            codes = rounded.nan_to_num_(0).clamp_(-most, most).to(torch.int8)
        codes = codes.flatten(-2)[..., :length]
        if self.bits == 1:
            packed = pack_bits(codes)
        elif self.bits == 8:
            packed = codes.contiguous().view(torch.uint8)
        else:
            halves = pad(codes + 7, (0, length % 2)).to(torch.uint8)
            packed = halves[..., 0::2] | halves[..., 1::2] << 4
        return torch.cat([scales.contiguous().view(torch.uint8), packed], dim=-1)

    def _decode(self, rows: Tensor, length: int) -> Tensor:
        """Return `[n, bytes]` as `[n, length]` float32."""
        split = 4 * -(-length // self.block)
        scales = rows[..., :split].flatten().clone().view(torch.float32)
        packed = rows[..., split:]
        if self.bits == 1:
            codes = unpack_bits(packed, length).to(torch.int8) * 2 - 1
        elif self.bits == 8:
            codes = packed.contiguous().view(torch.int8)
        else:
            halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
            codes = halves[..., :length].to(torch.int8) - 7
        blocks = self._blocks(codes.float())
        return blocks.mul_(scales.view(*blocks.shape[:-1], 1)).flatten(-2)[..., :length]

    def _blocks(self, rows: Tensor) -> Tensor:
        """Return `[n, length]` as `[n, blocks, block]`, padded with zeros."""
        padded = pad(rows, (0, -rows.shape[-1] % self.block))
        return padded.view(*rows.shape[:-1], -1, self.block)


# ------------------------------------------------------------------------------
# Integers as bits, the lowest first; and bits as bytes, which are integers of 8 bits.


def bits_of(numbers: Tensor, width: int) -> Tensor:
    """Return integers, `[..., n]` below 2**width, as `[..., n * width]` bits, uint8."""
    places = torch.arange(width, dtype=numbers.dtype, device=numbers.device)
    return (numbers.unsqueeze(-1) >> places & 1).flatten(-2).to(torch.uint8)


def numbers_of(bits: Tensor, width: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return `[..., count * width]` bits as `[..., count]` integers."""
    places = torch.arange(width, dtype=dtype, device=bits.device)
    cut = bits.to(dtype).view(*bits.shape[:-1], count, width)
    return (cut << places).sum(-1, dtype=dtype)


def pack_bits(bits: Tensor) -> Tensor:
    """Return `[..., n]` of 0 and 1, uint8 or bool, as `[..., ceil(n / 8)]` uint8, zero-padded."""
    eights = pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8))
    return numbers_of(eights, 8, eights.shape[-1] // 8, torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits, as `[..., count]` uint8."""
    return bits_of(packed, 8)[..., :count]
