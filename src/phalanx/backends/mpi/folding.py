"""Contributions become one, with torch: for reductions whose parts MPI has brought together.

Torch's reductions are faster than those in MPI libraries, have bfloat16 and float16, and a meaning
for NaN. Contributions are reduced in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

BLOCK = 1 << 16  # elements reduced at a time in a wider dtype; they fit the second-level cache

_HALF = frozenset({torch.float16, torch.bfloat16})
_REAL = frozenset({torch.float32, torch.float64}) | _HALF
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_TRUTH = frozenset({torch.bool})
_NUMBERS = _REAL | _COMPLEX | _WHOLE

_COMBINE: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "sum": torch.add,
        "mean": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
)
_DTYPES: Mapping[str, frozenset[torch.dtype]] = MappingProxyType(
    {
        "sum": _NUMBERS | _TRUTH,
        "mean": _NUMBERS,
        "product": _NUMBERS | _TRUTH,
        "min": _REAL | _WHOLE | _TRUTH,
        "max": _REAL | _WHOLE | _TRUTH,
        "band": _WHOLE | _TRUTH,
        "bor": _WHOLE | _TRUTH,
        "bxor": _WHOLE | _TRUTH,
    }
)


def folds(op: str, dtype: torch.dtype) -> bool:
    """Whether `fold` can do this."""
    return dtype in _DTYPES[op]


def divide_(total: Tensor, count: int) -> None:
    """Make a sum a mean, in place; of integers, cut off towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")


def fold(parts: Sequence[Tensor], spare: Tensor, out: Tensor, op: str) -> None:
    """Reduce `parts`, flat and of one length, in their order into `out`.

    spare   memory of one part, which is overwritten; may be any part, if it is the first of those
            that `out` is not
    out     may be one of the parts

    Sums and products of float16 and bfloat16 are computed in float32 and rounded once.
    """
    if out.dtype in _HALF and op in ("sum", "mean", "product"):
        _fold_wider(parts, out, op)
        return
    combine = _COMBINE[op]
    total = parts[0]
    for part in parts[1:-1]:
        total = combine(total, part, out=spare)
    if len(parts) > 1:
        combine(total, parts[-1], out=out)
    elif total.data_ptr() != out.data_ptr():
        out.copy_(total)
    if op == "mean":
        divide_(out, len(parts))


def _fold_wider(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    combine = _COMBINE[op]
    for start in range(0, out.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        total = parts[0][block].to(torch.float32)
        for part in parts[1:]:
            combine(total, part[block], out=total)
        if op == "mean":
            divide_(total, len(parts))
        out[block].copy_(total)
