"""Averages of which each member needs its own shard: what a reduce-scatter is for dense ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from members import average, buckets_of, noise, padded
from torch import Tensor

from phalanx import ErrorFeedback, PowerSGD, Quantized, TopK
from phalanx.compression import Compressor, Half, RandomK
from phalanx.compression.compressor import AllReduceMean, AllToAll, Member, ReduceScatterMean

SHAPES = [(6, 5), (33,), (1, 1), (), (0,), (3, 0), (4, 3, 5)]
EXACT: dict[str, Callable[[], Compressor]] = {
    "TopK": lambda: TopK(1),
    "RandomK": lambda: RandomK(1),
    "PowerSGD": lambda: PowerSGD(9),
}
LOSSY: dict[str, Callable[[], Compressor]] = {
    "TopK": lambda: TopK(0.05),
    "RandomK": lambda: RandomK(0.1),
    "float16": lambda: Half(torch.float16),
    "bfloat16": Half,
    "8 bits": Quantized,
    "4 bits": lambda: Quantized(4, block=7),
    "1 bit": lambda: Quantized(1, block=16),
    "PowerSGD": lambda: PowerSGD(1),
}


def given(p: int, seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[list[Tensor]]:
    """Every member's gradients."""
    return [
        [noise(*shape, seed=100 * seed + 10 * member + n) for n, shape in enumerate(shapes)]
        for member in range(p)
    ]


def dense_mean(per_member: list[list[Tensor]]) -> Tensor:
    buckets = buckets_of(per_member)
    return sum(bucket.flat.double() for bucket in buckets) / len(buckets)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", EXACT)
def test_shards_of_what_leaves_nothing_out_are_the_mean(name: str, p: int):
    values = given(p)
    shards = average([EXACT[name]() for _ in range(p)], padded(buckets_of(values)), shards=True)
    expected = dense_mean(values)
    found = torch.cat(shards)[: len(expected)]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LOSSY)
def test_what_shards_lack_is_the_members_residuals(name: str, p: int):
    """Over three passes: the mean of all gradients == all shards together + mean of residuals."""
    compressors = [ErrorFeedback(LOSSY[name]()) for _ in range(p)]
    came, wanted = 0, 0
    for step in range(3):
        values = given(p, seed=step)
        mean = dense_mean(values)
        found = torch.cat(average(compressors, padded(buckets_of(values)), shards=True))
        came, wanted = came + found[: len(mean)].double(), wanted + mean
        for compressor in compressors:
            compressor.commit()
    residual = [
        torch.cat([one.residual(f"g{n}") for n in range(len(SHAPES))]).double()
        for one in compressors
    ]
    torch.testing.assert_close(came + sum(residual) / p, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", LOSSY)
def test_two_averages_of_a_gradient_in_one_pass_lose_nothing(name: str, p: int):
    """As in a pass that comes to a unit twice: nothing is added twice, nothing is dropped."""
    compressors = [ErrorFeedback(LOSSY[name]()) for _ in range(p)]
    came, wanted = 0, 0
    for step in range(4):
        values = given(p, seed=step)
        mean = dense_mean(values)
        found = torch.cat(average(compressors, padded(buckets_of(values)), shards=True))
        came, wanted = came + found[: len(mean)].double(), wanted + mean
        if step % 2:
            for compressor in compressors:
                compressor.commit()
    residual = [
        torch.cat([one.residual(f"g{n}") for n in range(len(SHAPES))]).double()
        for one in compressors
    ]
    torch.testing.assert_close(came + sum(residual) / p, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_is_seen_by_the_owner_at_least(name: str, bad: float):
    values = given(3)
    values[1][1][-1] = bad  # of which the second member's shard has the end
    before = torch.cat([tensor.flatten() for tensor in values[1]])
    place = int((~before.isfinite()).nonzero()) // -(-len(before) // 3)
    shards = average([LOSSY[name]() for _ in range(3)], padded(buckets_of(values)), shards=True)
    assert not shards[place].isfinite().all()


@pytest.mark.parametrize("name", LOSSY)
def test_nothing_to_average_is_no_round(name: str):
    values = [[torch.zeros(0), torch.zeros(3, 0)]] * 2
    average([LOSSY[name]() for _ in range(2)], padded(buckets_of(values)), shards=True)


@pytest.mark.parametrize("p", [2, 5])
@pytest.mark.parametrize("name", LOSSY)
def test_shards_that_are_padding_throughout_are_no_problem(name: str, p: int):
    values = given(p, shapes=[(1,)])
    found = average([LOSSY[name]() for _ in range(p)], padded(buckets_of(values)), shards=True)
    assert [len(shard) for shard in found] == [1] * p
    if "bit" not in name:  # of zeros one bit makes something, which is cut off
        assert not torch.cat(found)[1:].any()


@pytest.mark.parametrize(
    ("compressor", "request_", "nbytes"),
    [
        (TopK(0.01), AllToAll, 4 * (10 * 4 + 11)),  # of each shard of 1000
        (RandomK(0.01), ReduceScatterMean, 4 * 10 * 4),
        (Half(), AllToAll, 4000 * 2),
        (Quantized(8), AllToAll, 4 * (1000 + 4 * 4)),
        (Quantized(1), AllToAll, 4 * (125 + 4 * 4)),
        (PowerSGD(2), AllReduceMean, 2 * 40 * 4),
    ],
    ids=str,
)
def test_one_message_of_so_many_bytes_is_given(compressor: Compressor, request_, nbytes: int):
    (bucket,) = buckets_of([[noise(40, 100)]])
    first = next(compressor.average_shard_(bucket, Member(0, 4)))
    assert (type(first), first.tensor.nbytes) == (request_, nbytes)


def test_a_compressor_that_says_nothing_of_shards_averages_all():
    class Plain(Half):
        average_shard_ = Compressor.average_shard_

    values = given(3)
    found = torch.cat(average([Plain() for _ in range(3)], padded(buckets_of(values)), shards=True))
    expected = dense_mean(values)
    torch.testing.assert_close(found[: len(expected)].double(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", LOSSY)
def test_float64_and_short_dtypes_keep_theirs(name: str):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        values = [[tensor.to(dtype) for tensor in tensors] for tensors in given(2)]
        shards = average([LOSSY[name]() for _ in range(2)], padded(buckets_of(values)), shards=True)
        assert [shard.dtype for shard in shards] == [dtype, dtype]
        assert all(shard.isfinite().all() for shard in shards)
