"""What a random operation can be: dtypes, reductions, algorithms, layouts, shapes."""

from __future__ import annotations

import random

import torch
from stress_kinds import KINDS

REALS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*REALS * 2, *WHOLE, *UNSIGNED, torch.bool, torch.complex64, torch.complex128)
LAYOUTS = ("plain", "plain", "offset", "gaps", "transposed")
LARGE = 0.02  # of all shapes: 64 Ki to 256 Ki elements


def ops_for(dtype: torch.dtype) -> list[str]:
    """The reductions that have a meaning for a dtype, by name."""
    names = ["SUM", "PRODUCT"]
    if dtype is not torch.bool:
        names.append("MEAN")
    if not dtype.is_complex:
        names += ["MIN", "MAX"]
        if not dtype.is_floating_point:
            names += ["BAND", "BOR", "BXOR"]
    return names


def algorithms_for(kind: str) -> tuple[str, ...]:
    """What may be asked for as `algorithm=`; of a collective made of another one, that one's."""
    name = {"all_reduce_coalesced": "all_reduce", "all_to_all_uneven": "all_to_all"}.get(kind, kind)
    return KINDS[kind].algorithms(name)


def a_shape(draw: random.Random) -> tuple[int, ...]:
    """Mostly small; none, zero, and a few large ones among them."""
    if draw.random() < LARGE:
        return (draw.randint(64 << 10, 256 << 10),)
    count = draw.choice((0, 1, 2, 3, 7, 64, 1000, 5000))
    return draw.choice(((), (count,), (count,), (count, 3), (3, count), (2, 1, count)))
