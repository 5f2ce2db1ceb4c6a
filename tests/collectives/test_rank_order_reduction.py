"""The arithmetic of several contributions at once: in rank order, into any memory."""

from __future__ import annotations

import os

import pytest
import torch
from processes import run_python
from torch import Tensor

from phalanx import ReduceOp
from phalanx.core.reduce_op import BLOCK, REDUCTIONS, RankOrderReduction, reduction_for

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
DTYPES += [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool]
MEANINGFUL = [(op, dtype) for op in ReduceOp for dtype in DTYPES if dtype in REDUCTIONS[op].dtypes]


def contributions(dtype: torch.dtype, count: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(-5, 6, (count, length), generator=generator)
    return list((values > 0 if dtype is torch.bool else values.abs().to(dtype)).unbind())


def reduce_(parts: list[Tensor], out: Tensor, op: ReduceOp) -> None:
    divisor = len(parts) if op is ReduceOp.MEAN else 1
    RankOrderReduction(reduction_for(op, out.dtype), out.dtype, divisor).reduce(parts, out)


def one_by_one(parts: list[Tensor], op: ReduceOp) -> Tensor:
    """What torch makes of them, one after the other, in a dtype that rounds nothing away."""
    dtype = parts[0].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    total, *others = [part.to(torch.float64) if half else part for part in parts]
    for other in others:
        total = {
            ReduceOp.SUM: torch.add,
            ReduceOp.MEAN: torch.add,
            ReduceOp.PRODUCT: torch.mul,
            ReduceOp.MIN: torch.minimum,
            ReduceOp.MAX: torch.maximum,
            ReduceOp.BAND: torch.bitwise_and,
            ReduceOp.BOR: torch.bitwise_or,
            ReduceOp.BXOR: torch.bitwise_xor,
        }[op](total, other)
    if op is ReduceOp.MEAN:
        whole = not (total.is_floating_point() or total.is_complex())
        total = total.div(len(parts), rounding_mode="trunc") if whole else total / len(parts)
    return total.to(dtype)


@pytest.mark.parametrize(("op", "dtype"), MEANINGFUL, ids=str)
def test_the_result_may_replace_any_contribution(op: ReduceOp, dtype: torch.dtype) -> None:
    for count, own in ((n, rank) for n in (2, 3, 5) for rank in range(n)):
        parts = contributions(dtype, count, 17)
        expected = one_by_one(parts, op)
        reduce_(parts, parts[own], op)
        assert torch.equal(parts[own], expected), (count, own)
        parts = contributions(dtype, count, 17)
        out = torch.empty_like(parts[0])
        reduce_(parts, out, op)
        assert torch.equal(out, expected), (count, own)


def test_half_precision_is_rounded_once_and_does_not_overflow_in_a_mean() -> None:
    length = BLOCK + 3
    parts = [torch.full((length,), value).half() for value in (60000.0, 60000.0, 1.0)]
    out = torch.empty(length, dtype=torch.float16)
    reduce_(parts, out, ReduceOp.MEAN)
    assert torch.equal(out, torch.full((length,), 120001 / 3).half())
    parts = [torch.full((3,), value).bfloat16() for value in (256.0, 1.0, 1.0)]
    reduce_(parts, parts[2], ReduceOp.SUM)
    assert parts[2].tolist() == [258.0] * 3, "256 + 1 is 256 in bfloat16"


def test_what_is_no_number_is_the_least_and_the_largest() -> None:
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        parts = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])]
        reduce_(parts, parts[0], op)
        assert parts[0].isnan().all()


ONE_THREAD = """
import os, torch
from phalanx import ReduceOp
from phalanx.collectives.plan import Arithmetic, Key, make_plan
from phalanx.core.matching import BLOCK
from phalanx.core.reduce_op import RankOrderReduction, reduction_for

def threads_started(function):
    before = len(os.listdir("/proc/self/task"))
    function()
    return len(os.listdir("/proc/self/task")) - before

for dtype in (torch.float32, torch.bfloat16):
    parts, out = torch.empty(3, 2 << 20, dtype=dtype).unbind(), torch.empty(2 << 20, dtype=dtype)
    reduction = RankOrderReduction(reduction_for(ReduceOp.MEAN, dtype), dtype, 3)
    print(threads_started(lambda: reduction.reduce(parts, out)))
one, block = torch.empty(BLOCK // 4), memoryview(bytearray(BLOCK))
plan = make_plan(Key("all_reduce", "ring", (BLOCK // 4,), one.dtype, ReduceOp.SUM), 0, 2)
print(threads_started(lambda: Arithmetic(plan, one, None).combine(0, 0, block)))
print(threads_started(lambda: torch.add(parts[0], parts[1], out=out)))  # so they would be seen
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="shows no threads")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="torch starts no thread with one core")
def test_large_parts_are_reduced_without_other_threads() -> None:
    """Which would wait for each other after every block, where other ranks need the cores."""
    ended = run_python(["-c", ONE_THREAD], environ={**os.environ, "OMP_NUM_THREADS": "4"})
    assert ended.returncode == 0, ended.stderr
    *reductions, whole = map(int, ended.stdout.split())
    assert reductions == [0, 0, 0]
    assert whole > 0
