"""The reduce operations, which combine the values of all ranks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from phalanx.errors import UnsupportedOperationError


class ReduceOp(enum.Enum):
    """The operations that combine values of different ranks.

    op         of                          is
    SUM        numbers                     their sum; integers wrap around, as torch's do
    SUM        booleans                    True if any rank has True
    MEAN       numbers, no booleans        the sum divided by the number of ranks; of integers, cut
                                           off towards zero, as NCCL's is
    MIN, MAX   real numbers and booleans   NaN if any rank has NaN
    PRODUCT    numbers                     their product
    PRODUCT    booleans                    True if all ranks have True
    BAND, BOR, BXOR   integers, booleans   bit by bit

    There is no reduction of 8-bit floats: convert them.

    float16, bfloat16 and complex32 are summed and multiplied in float32 (complex64) and rounded
    once, if all contributions to an element meet in one place (two ranks, or `direct` or `star`);
    in the other algorithms they are rounded at every addition. A MEAN of float16 does not overflow
    on the way: the other algorithms divide by a power of two first.
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    __hash__ = object.__hash__  # by identity: that of enum.Enum takes as long as a whole call


Combination: TypeAlias = Callable[..., object]
"""`combine(first, second, out=out)`, as torch's functions: `out` is either one, or other memory."""


class Reduction(NamedTuple):
    """One row of the table: a function that combines, and its dtypes."""

    combine: Combination
    dtypes: frozenset[torch.dtype]
    adds_up: bool = False  # rounds at every step: better done in a wider dtype


WIDER: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.complex32: torch.complex64,
    }
)
"""What sums and products of a short dtype are computed in, where that costs no traffic."""

NARROW = frozenset({torch.float16, torch.complex32})
"""Dtypes of so small a range that the sum of a few ranks' values may leave it."""

_SIGNED: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
)
"""The dtypes with which torch does not compute on a CPU, and those with the same bits that it does.

Sums, products and bitwise operations do not depend on the sign of the numbers that bits mean.
"""

_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_TRUTH = frozenset({torch.bool})


def _as_signed(combine: Combination) -> Combination:
    """Return the same function on the same bits, taken as signed numbers."""

    def combined(first: Tensor, second: Tensor, *, out: Tensor) -> object:
        signed = _SIGNED[out.dtype]
        return combine(first.view(signed), second.view(signed), out=out.view(signed))

    return combined


def _in_order(combine: Combination) -> Combination:
    """Return `_as_signed` for comparisons: the inverted highest bit makes the order right."""

    def combined(first: Tensor, second: Tensor, *, out: Tensor) -> object:
        signed = _SIGNED[out.dtype]
        lowest = torch.iinfo(signed).min
        result = out.view(signed)
        combine(
            first.view(signed).bitwise_xor(lowest),
            second.view(signed).bitwise_xor(lowest),
            out=result,
        )
        return result.bitwise_xor_(lowest)

    return combined


REDUCTIONS: Mapping[ReduceOp, Reduction] = MappingProxyType(
    {
        ReduceOp.SUM: Reduction(torch.add, _REAL | _WHOLE | _COMPLEX | _TRUTH, adds_up=True),
        ReduceOp.MEAN: Reduction(torch.add, _REAL | _WHOLE | _COMPLEX, adds_up=True),
        ReduceOp.MIN: Reduction(torch.minimum, _REAL | _WHOLE | _TRUTH),
        ReduceOp.MAX: Reduction(torch.maximum, _REAL | _WHOLE | _TRUTH),
        ReduceOp.PRODUCT: Reduction(torch.mul, _REAL | _WHOLE | _COMPLEX | _TRUTH, adds_up=True),
        ReduceOp.BAND: Reduction(torch.bitwise_and, _WHOLE | _TRUTH),
        ReduceOp.BOR: Reduction(torch.bitwise_or, _WHOLE | _TRUTH),
        ReduceOp.BXOR: Reduction(torch.bitwise_xor, _WHOLE | _TRUTH),
    }
)


def reduction_for(
    op: ReduceOp | None,
    dtype: torch.dtype,
    *,
    rank: int | None = None,
    collective: str | None = None,
) -> Reduction:
    """Return the reduction `op` for tensors of this dtype. `UnsupportedOperationError` without one.

    `rank` and `collective` are named in the error.
    """
    where = "" if rank is None else f"rank {rank}: {collective}: "
    reduction = REDUCTIONS.get(op) if op is not None else None
    if reduction is None:
        names = ", ".join(f"ReduceOp.{member.name}" for member in ReduceOp)
        meant = op.upper() if isinstance(op, str) else ""
        hint = f": ReduceOp.{meant}?" if meant in ReduceOp.__members__ else ""
        raise TypeError(f"{where}op must be one of {names}, not {op!r}{hint}")
    if dtype not in reduction.dtypes:
        raise UnsupportedOperationError(
            f"{where}{op} has no meaning for {dtype}; convert the tensor first",
            rank=rank,
            op=collective,
        )
    if dtype in _SIGNED:
        wrap = _in_order if op in (ReduceOp.MIN, ReduceOp.MAX) else _as_signed
        return reduction._replace(combine=wrap(reduction.combine))
    return reduction


def mean_of_two(first: Tensor, second: Tensor, *, out: Tensor) -> object:
    """Return the mean of two ranks' floating-point values; narrow dtypes computed in wider ones."""
    if out.dtype not in NARROW:
        return torch.add(first, second, out=out).div_(2)
    total = first.to(WIDER[out.dtype])
    total += second.to(total.dtype)
    return out.copy_(total.div_(2))


def divide_(values: Tensor, divisor: float) -> None:
    """Make a sum a mean, in place."""
    dtype = values.dtype
    if dtype is torch.complex32:  # for which torch has no division
        values.copy_(values.to(torch.complex64).div_(divisor))
    elif dtype.is_floating_point or dtype.is_complex:
        values.div_(divisor)
    elif dtype is torch.uint64:
        _divide_uint64_(values.view(torch.int64), int(divisor))
    elif dtype in _SIGNED:
        values.copy_(values.to(torch.int64).div_(int(divisor), rounding_mode="trunc"))
    else:
        values.div_(int(divisor), rounding_mode="trunc")


def _divide_uint64_(bits: Tensor, count: int) -> None:
    """Divide unsigned numbers, of which torch sees the bits as signed ones.

    Half of each is not negative, and can be divided; twice the quotient is at most 1 too small.
    """
    half = bits.bitwise_right_shift(1).bitwise_and_(torch.iinfo(torch.int64).max)
    quotient = half.div_(count, rounding_mode="trunc").mul_(2)
    rest = bits - quotient * count
    bits.copy_(quotient.add_(rest >= count))


# ------------------------------------------------------------------------------
# Several contributions at once.

# Elements reduced at a time in a wider dtype, or beside the result: more are computed in several
# threads by torch. After every block these wait for each other, which takes seconds in all if ranks
# share the cores.
BLOCK = 32 << 10
LARGEST = 1 << 20  # bytes reduced at a time in the result itself


class RankOrderReduction:
    """A reduction of several contributions in the order of the ranks, rounded once.

    So the bits are the same on every rank and backend. Short floating-point dtypes are reduced in a
    wider one. With a `divisor`, their number, the result is a mean. `combine` reduces two.
    """

    def __init__(self, reduction: Reduction, dtype: torch.dtype, divisor: int = 1) -> None:
        self.combine = reduction.combine
        if divisor == 2 and (dtype.is_floating_point or dtype.is_complex):
            self.combine, divisor = mean_of_two, 1
        self._wider = WIDER.get(dtype) if reduction.adds_up else None
        self._divisor = divisor
        self._scratch: Tensor | None = None

    @property
    def of_two(self) -> Combination | None:
        """`combine`, if two contributions take no more than that."""
        return self.combine if self._wider is None and self._divisor == 1 else None

    def reduce(self, parts: list[Tensor], out: Tensor) -> None:
        """Reduce `parts`, at least two, into `out`, which may be the memory of one of them."""
        if self._wider is None and (len(parts) == 2 or self._fits(parts, out)):
            self._reduce_in(out, parts)
        elif out.numel() <= BLOCK:
            self._reduce_beside(out, parts)
        else:
            for start in range(0, out.numel(), BLOCK):
                block = slice(start, start + BLOCK)
                self._reduce_beside(out[block], [part[block] for part in parts])

    def _fits(self, parts: list[Tensor], out: Tensor) -> bool:
        """Return whether `out` can hold partial results: it fits the cache, no part comes later."""
        if out.nbytes > LARGEST:
            return False
        address = out.data_ptr()
        return all(part.data_ptr() != address for part in parts[2:])

    def _reduce_in(self, total: Tensor, parts: list[Tensor]) -> None:
        self.combine(parts[0], parts[1], out=total)
        for part in parts[2:]:
            self.combine(total, part, out=total)
        if self._divisor != 1:
            divide_(total, self._divisor)

    def _reduce_beside(self, out: Tensor, parts: list[Tensor]) -> None:
        """Reduce in memory wider than `out`, or apart from parts that are still to be read."""
        if self._wider is not None:
            total = parts[0].to(self._wider)
            for part in parts[1:]:
                self.combine(total, part.to(self._wider), out=total)
            if self._divisor != 1:
                divide_(total, self._divisor)
        else:
            count = out.numel()
            if self._scratch is None or self._scratch.numel() < count:
                self._scratch = torch.empty(count, dtype=out.dtype)
            total = self._scratch[:count]
            self._reduce_in(total, parts)
        out.copy_(total)
