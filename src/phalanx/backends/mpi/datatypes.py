"""What MPI calls torch's dtypes and reductions.

Memory that is only moved is moved in units of its elements' size. What is reduced has the MPI
datatype of its numbers, and an MPI operation with the meaning that `ReduceOp` gives it:

    dtype                  sum, product      mean            min, max     band, bor, bxor
    float32, float64       SUM, PROD         SUM, divided    -            -
    complex64, complex128  SUM, PROD         SUM, divided    -            -
    int8 ... int64, uint8  SUM, PROD         SUM, divided    MIN, MAX     BAND, BOR, BXOR
    uint16, 32, 64         SUM, PROD         -               MIN, MAX     BAND, BOR, BXOR
    bool                   MAX, MIN          -               MIN, MAX     BAND, BOR, BXOR

MPI does not say what the least of some numbers and NaN is, and knows neither bfloat16 nor float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

MOST = 2**31 - 1  # elements in one call, for libraries that count with C's int

MOVED: Mapping[int, str] = MappingProxyType(
    {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
)
"""Bytes of an element -> the MPI datatype as which it is moved."""

_REAL = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}
_COMPLEX = {torch.complex64: "C_FLOAT_COMPLEX", torch.complex128: "C_DOUBLE_COMPLEX"}
_WHOLE = {
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
}
_UNSIGNED = {torch.uint16: "UINT16_T", torch.uint32: "UINT32_T", torch.uint64: "UINT64_T"}
_TRUTH = {torch.bool: "UINT8_T"}  # zeros and ones


class Reduction(NamedTuple):
    """How MPI reduces tensors of one dtype: the names of its datatype and of its operation."""

    datatype: str
    op: str


def _rows() -> Mapping[tuple[str, torch.dtype], Reduction]:
    numbers, ordered = _REAL | _COMPLEX | _WHOLE, _WHOLE | _UNSIGNED
    rows = {
        ("sum", "SUM"): numbers | _UNSIGNED,
        ("product", "PROD"): numbers | _UNSIGNED,
        ("mean", "SUM"): numbers,
        ("min", "MIN"): ordered | _TRUTH,
        ("max", "MAX"): ordered | _TRUTH,
        ("band", "BAND"): ordered | _TRUTH,
        ("bor", "BOR"): ordered | _TRUTH,
        ("bxor", "BXOR"): ordered | _TRUTH,
        ("sum", "MAX"): _TRUTH,
        ("product", "MIN"): _TRUTH,
    }
    return MappingProxyType(
        {
            (ours, dtype): Reduction(datatype, op)
            for (ours, op), datatypes in rows.items()
            for dtype, datatype in datatypes.items()
        }
    )


REDUCED = _rows()
"""(reduction, dtype) -> how MPI does it."""
