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
    """One row of the table: `combine(into, other)` works in place, on these dtypes."""

    combine: Callable[[Tensor, Tensor], object]
    dtypes: frozenset[torch.dtype]


_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_TRUTH = frozenset({torch.bool})
# Torch computes nothing with its other dtypes on a CPU (8-bit floats, larger unsigned integers).


def _sum(into: Tensor, other: Tensor) -> object:
    return torch.add(into, other, out=into)


REDUCTIONS = {
    ReduceOp.SUM: Reduction(_sum, _REAL | _WHOLE | _COMPLEX),
    ReduceOp.MEAN: Reduction(_sum, _REAL | _WHOLE | _COMPLEX),
    ReduceOp.MIN: Reduction(lambda a, b: torch.minimum(a, b, out=a), _REAL | _WHOLE | _TRUTH),
    ReduceOp.MAX: Reduction(lambda a, b: torch.maximum(a, b, out=a), _REAL | _WHOLE | _TRUTH),
    ReduceOp.PRODUCT: Reduction(lambda a, b: torch.mul(a, b, out=a), _REAL | _WHOLE | _COMPLEX),
    ReduceOp.BAND: Reduction(lambda a, b: torch.bitwise_and(a, b, out=a), _WHOLE | _TRUTH),
    ReduceOp.BOR: Reduction(lambda a, b: torch.bitwise_or(a, b, out=a), _WHOLE | _TRUTH),
    ReduceOp.BXOR: Reduction(lambda a, b: torch.bitwise_xor(a, b, out=a), _WHOLE | _TRUTH),
}


def reduction_for(op: ReduceOp, dtype: torch.dtype) -> Reduction:
    """The reduction `op` for tensors of this dtype; `UnsupportedOperationError` if it has none."""
    reduction = REDUCTIONS.get(op)
    if reduction is None:
        names = ", ".join(f"ReduceOp.{member.name}" for member in ReduceOp)
        raise TypeError(f"op must be one of {names}, not {op!r}")
    if dtype not in reduction.dtypes:
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
