"""What each collective must give, worked out on one rank with plain torch; and values to try."""

from __future__ import annotations

from functools import reduce

import torch
from hypothesis import strategies as st
from torch import Tensor

from phalanx import ReduceOp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
ALGORITHMS = ("auto", "ring", "direct", "tree", "halving_doubling", "star", "two_level")
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

sizes = st.integers(1, 9)
any_dtype = st.sampled_from((*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn))
algorithms = st.sampled_from(ALGORITHMS)
dtypes = st.sampled_from(FLOATS + INTEGERS)
seeds = st.integers(0, 2**16)
shapes = st.one_of(
    st.just(()),
    st.just((0,)),
    st.just((0, 3)),
    st.integers(1, 40).map(lambda n: (n,)),
    st.tuples(st.integers(1, 7), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.just(1), st.integers(1, 4)),
)


def ops_for(dtype: torch.dtype) -> st.SearchStrategy[ReduceOp]:
    floating = [op for op in ReduceOp if op not in BITWISE]
    return st.sampled_from(floating if dtype.is_floating_point else list(ReduceOp))


def exact_values(
    shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOp, rank: int, seed: int
) -> Tensor:
    """Values whose reduction over 9 ranks is exact in `dtype`, in whatever order it is done."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    low, high = (-2, 3) if op is ReduceOp.PRODUCT else (-9, 10)
    if not dtype.is_signed:
        low = 0
    values = torch.randint(low, high, shape, generator=generator)
    if op is ReduceOp.PRODUCT:  # of powers of two, so that every dtype can hold every product
        values = values.sign() * values.abs().clamp(max=2)
    return values.to(dtype)


def values_of(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int) -> Tensor:
    """Any bits that this dtype may have."""
    if dtype is torch.bool:
        return rough_values(shape, torch.float32, rank, seed) > 0
    return rough_values(shape, torch.float32, rank, seed).to(dtype)


def rough_values(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int) -> Tensor:
    """Values whose sum depends on the order in which it is done."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    scale = torch.randint(-8, 8, shape, generator=generator, dtype=torch.float64)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 2**scale).to(dtype)


def reduced(values: list[Tensor], op: ReduceOp) -> Tensor:
    """The reduction of all ranks' values, in rank order; of 16-bit floats rounded once."""
    if values[0].dtype in (torch.float16, torch.bfloat16):
        return reduced([value.float() for value in values], op).to(values[0].dtype)
    combine = {
        ReduceOp.SUM: torch.add,
        ReduceOp.MEAN: torch.add,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }[op]
    total = reduce(combine, values)
    if op is not ReduceOp.MEAN:
        return total
    if total.dtype.is_floating_point:
        return total / len(values)
    return torch.div(total, len(values), rounding_mode="trunc")


def same(left: Tensor, right: Tensor) -> bool:
    """Shape, dtype and every bit, so that 0.0 is not -0.0 and NaN is NaN."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    one, two = (torch.empty(t.shape, dtype=t.dtype).copy_(t).flatten() for t in (left, right))
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))
