"""The arithmetic of large reductions over MPI: contributions in rank order, into any memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.native.mpi_collectives import BLOCK, fold, folds

OPS = ["sum", "mean", "product", "min", "max", "band", "bor", "bxor"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
DTYPES += [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool]
MEANINGFUL = [(op, dtype) for op in OPS for dtype in DTYPES if folds(op, dtype)]


def contributions(dtype: torch.dtype, count: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(-5, 6, (count, length), generator=generator)
    return list((values > 0 if dtype is torch.bool else values.abs().to(dtype)).unbind())


def one_by_one(parts: list[Tensor], op: str) -> Tensor:
    """What torch makes of them, one after the other, in a dtype that rounds nothing away."""
    dtype = parts[0].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    total, *others = [part.to(torch.float64) if half else part for part in parts]
    for other in others:
        total = {
            "sum": torch.add,
            "mean": torch.add,
            "product": torch.mul,
            "min": torch.minimum,
            "max": torch.maximum,
            "band": torch.bitwise_and,
            "bor": torch.bitwise_or,
            "bxor": torch.bitwise_xor,
        }[op](total, other)
    if op == "mean":
        whole = not (total.is_floating_point() or total.is_complex())
        total = total.div(len(parts), rounding_mode="trunc") if whole else total / len(parts)
    return total.to(dtype)


@pytest.mark.parametrize(("op", "dtype"), MEANINGFUL, ids=str)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_result_may_replace_any_contribution(op: str, dtype: torch.dtype, count: int) -> None:
    for own in range(count):
        parts = contributions(dtype, count, 17)
        expected = one_by_one(parts, op)
        spare = parts[1 if own == 0 else 0]
        fold(parts, spare, parts[own], op)
        assert torch.equal(parts[own], expected)
        parts = contributions(dtype, count, 17)
        out = torch.empty_like(parts[0])
        fold(parts, parts[1 if own == 0 else 0], out, op)
        assert torch.equal(out, expected)


def test_half_precision_is_rounded_once_and_does_not_overflow_in_a_mean() -> None:
    length = BLOCK + 3
    parts = [torch.full((length,), value).half() for value in (60000.0, 60000.0, 1.0)]
    out = torch.empty(length, dtype=torch.float16)
    fold(parts, parts[0], out, "mean")
    assert torch.equal(out, torch.full((length,), 120001 / 3).half())
    parts = [torch.full((3,), value).bfloat16() for value in (256.0, 1.0, 1.0)]
    fold(parts, parts[0], parts[2], "sum")
    assert parts[2].tolist() == [258.0] * 3, "256 + 1 is 256 in bfloat16"


def test_what_is_no_number_is_the_least_and_the_largest() -> None:
    for op in ("min", "max"):
        parts = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])]
        fold(parts, parts[1], parts[0], op)
        assert parts[0].isnan().all()
