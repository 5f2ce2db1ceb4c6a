"""The reductions: what is done with the values of many ranks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import UnsupportedOperationError


class ReduceOp(enum.Enum):
    """How values of different ranks become one.

    MEAN is the sum divided by the number of ranks; for integers it is cut off towards zero, as
    NCCL's is. MIN and MAX give NaN where any rank has NaN. Sums of float16 and bfloat16 are
    rounded to that type at every addition.
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


class Reduction(NamedTuple):
    """One row of the table: `combine(into, other)` works in place, `takes` says which dtypes."""

    combine: Callable[[Tensor, Tensor], object]
    takes: Callable[[torch.dtype], bool]


def _numbers(dtype: torch.dtype) -> bool:
    return dtype is not torch.bool


def _ordered(dtype: torch.dtype) -> bool:
    return not dtype.is_complex


def _bits(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _sum(into: Tensor, other: Tensor) -> object:
    return torch.add(into, other, out=into)


REDUCTIONS = {
    ReduceOp.SUM: Reduction(_sum, _numbers),
    ReduceOp.MEAN: Reduction(_sum, _numbers),
    ReduceOp.MIN: Reduction(lambda a, b: torch.minimum(a, b, out=a), _ordered),
    ReduceOp.MAX: Reduction(lambda a, b: torch.maximum(a, b, out=a), _ordered),
    ReduceOp.PRODUCT: Reduction(lambda a, b: torch.mul(a, b, out=a), _numbers),
    ReduceOp.BAND: Reduction(lambda a, b: torch.bitwise_and(a, b, out=a), _bits),
    ReduceOp.BOR: Reduction(lambda a, b: torch.bitwise_or(a, b, out=a), _bits),
    ReduceOp.BXOR: Reduction(lambda a, b: torch.bitwise_xor(a, b, out=a), _bits),
}


def reduction_for(op: ReduceOp, dtype: torch.dtype) -> Reduction:
    """The reduction `op` for tensors of this dtype; `UnsupportedOperationError` if it has none."""
    reduction = REDUCTIONS.get(op)
    if reduction is None:
        names = ", ".join(f"ReduceOp.{member.name}" for member in ReduceOp)
        raise TypeError(f"op must be one of {names}, not {op!r}")
    if not reduction.takes(dtype):
        raise UnsupportedOperationError(
            f"{op} has no meaning for {dtype}; convert the tensor first", op=op.value
        )
    return reduction


def divide_(values: Tensor, count: int) -> None:
    """Make a sum a mean, in place."""
    if values.dtype.is_floating_point or values.dtype.is_complex:
        values.div_(count)
    else:
        values.div_(count, rounding_mode="trunc")
