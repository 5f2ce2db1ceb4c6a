"""Every dtype that torch has is moved bit for bit, and reduced wherever that has a meaning."""

from __future__ import annotations

import pytest
import torch
from collective_reference import reduced, same
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import phalanx
from phalanx import Backend, ReduceOp, UnsupportedOperationError, simulate
from phalanx.wire.codec import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

EVERY = ["ring", "direct", "tree", "halving_doubling", "star", "two_level"]
UNSIGNED = {torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}


def bits(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Any bits; of bools those that mean one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    return (values % 2 if dtype is torch.bool else values).view(dtype)


def as_bytes(tensor: Tensor) -> list[int]:
    """Of any dtype, by way of one of the same size that torch can copy."""
    same_size = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128)
    copied = tensor.view(next(d for d in same_size if d.itemsize == tensor.itemsize)).contiguous()
    return list(copied.view(torch.uint8).tolist())


def strided(tensor: Tensor) -> Tensor:
    """The same bits, every other element of something else."""
    wide = torch.empty(2 * tensor.numel(), dtype=tensor.dtype)
    wide.view(torch.uint8).view(-1, tensor.itemsize)[::2] = tensor.view(torch.uint8).view(
        -1, tensor.itemsize
    )
    return wide[::2]


@pytest.mark.checkered
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("cut", [lambda t: t, strided], ids=["contiguous", "strided"])
def test_every_dtype_is_moved_bit_for_bit(dtype: torch.dtype, cut: object) -> None:
    size, n = 3, 2
    values = [bits(dtype, size * n, seed) for seed in range(size)]
    raw = [as_bytes(value) for value in values]
    slice_ = n * dtype.itemsize

    def run(backend: Backend) -> None:
        rank = backend.rank
        mine = cut(values[rank])  # type: ignore[operator]
        everything = [byte for one in raw for byte in one]
        column = [byte for one in raw for byte in one[slice_ * rank : slice_ * (rank + 1)]]
        assert as_bytes(phalanx.broadcast(mine, backend, 1)) == raw[1]
        assert as_bytes(phalanx.all_gather(mine, backend)) == everything
        gathered = phalanx.gather(mine, backend, 2)
        assert gathered is None or as_bytes(gathered) == everything
        part = phalanx.scatter(mine, backend, 1)
        assert as_bytes(part) == raw[1][slice_ * rank : slice_ * (rank + 1)]
        assert as_bytes(phalanx.all_to_all(mine, backend)) == column
        rows = [n] * size
        assert as_bytes(phalanx.all_to_all_uneven(mine, backend, rows, rows)) == column
        inplace = cut(bits(dtype, size * n, rank))  # type: ignore[operator]
        into = cut(bits(dtype, size * n, rank))  # type: ignore[operator]
        phalanx.broadcast_(inplace, backend, 0)
        assert phalanx.broadcast(mine, backend, 0, into=into) is into
        assert (as_bytes(inplace), as_bytes(into)) == (raw[0], raw[0])
        other = (rank + 1) % size
        received = torch.empty(size * n, dtype=dtype)
        backend.sendrecv(values[rank], other, received, (rank - 1) % size)
        assert as_bytes(received) == raw[(rank - 1) % size]

    simulate(run, size)


def test_conjugated_and_negated_views_are_moved_as_what_they_mean() -> None:
    """torch conjugates and negates lazily: the bytes in memory are those of another tensor."""

    def run(backend: Backend) -> None:
        value = torch.tensor([1 + 2j, 3 - 4j])
        mine = value.conj() if backend.rank == 0 else value
        plain = torch.tensor([1 - 2j, 3 + 4j]) if backend.rank == 0 else value.clone()
        assert mine.is_conj() == (backend.rank == 0)
        assert torch.equal(phalanx.all_reduce(mine, backend), torch.tensor([2 + 0j, 6 + 0j]))
        assert torch.equal(phalanx.all_gather(mine, backend), phalanx.all_gather(plain, backend))
        assert torch.equal(phalanx.all_to_all(mine, backend), phalanx.all_to_all(plain, backend))
        for view, due in ((mine.imag, plain.imag), (mine, plain)):
            joined, expected = phalanx.gather(view, backend), phalanx.gather(due, backend)
            assert joined is None or torch.equal(joined, expected)  # type: ignore[arg-type]
            part = phalanx.scatter(view, backend)
            assert torch.equal(part, phalanx.scatter(due, backend))
        (copy,) = phalanx.all_reduce_coalesced([mine], backend)
        assert torch.equal(copy, torch.tensor([2 + 0j, 6 + 0j]))
        into = torch.zeros(2, dtype=torch.complex64).conj()
        phalanx.broadcast(mine, backend, 1, into=into)
        assert torch.equal(into, value)
        assert torch.equal(phalanx.all_reduce_(mine, backend), torch.tensor([2 + 0j, 6 + 0j]))
        phalanx.broadcast_(mine, backend, 1)
        assert torch.equal(mine, torch.tensor([2 + 0j, 6 + 0j]))

    simulate(run, 2)


# --------------------------------------------------------------------------------------- reductions


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_sum_of_booleans_is_true_where_any_is_and_a_product_where_all_are(
    algorithm: str, size: int
) -> None:
    def run(backend: Backend) -> list[list[bool]]:
        flags = torch.tensor([True, backend.rank == 0, backend.rank != 0, False])
        return [
            phalanx.all_reduce(flags, backend, op, algorithm=algorithm).tolist()
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT)
        ]

    alone = size == 1
    for any_, all_ in simulate(run, size):
        assert any_ == [True, True, not alone, False]
        assert all_ == [True, alone, False, False]


def test_a_mean_of_booleans_is_refused_naming_who_asked_for_what() -> None:
    def run(backend: Backend) -> None:
        with pytest.raises(UnsupportedOperationError, match=r"no meaning for torch\.bool") as info:
            phalanx.reduce(torch.tensor([True]), backend, 0, ReduceOp.MEAN)
        assert str(info.value).startswith(f"rank {backend.rank}: reduce: ReduceOp.MEAN")
        assert (info.value.rank, info.value.op) == (backend.rank, "reduce")

    simulate(run, 2)


@settings(max_examples=examples(60))
@given(
    st.sampled_from(list(UNSIGNED)),
    st.sampled_from(list(ReduceOp)),
    st.sampled_from(EVERY),
    st.integers(1, 6),
    st.data(),
)
def test_large_unsigned_integers_are_reduced_as_what_they_mean(
    dtype: torch.dtype, op: ReduceOp, algorithm: str, size: int, data: st.DataObject
) -> None:
    """Of which torch itself knows only how to copy them: compared with Python's own integers."""
    modulus = 1 << UNSIGNED[dtype]
    number = (
        st.integers(0, modulus - 1) | st.integers(0, 9) | st.integers(modulus // 2, modulus - 1)
    )
    rows = data.draw(
        st.lists(st.lists(number, min_size=4, max_size=4), min_size=size, max_size=size)
    )

    def reduce_column(column: tuple[int, ...]) -> int:
        result = column[0]
        for value in column[1:]:
            result = {
                ReduceOp.SUM: lambda a, b: (a + b) % modulus,
                ReduceOp.MEAN: lambda a, b: (a + b) % modulus,
                ReduceOp.MIN: min,
                ReduceOp.MAX: max,
                ReduceOp.PRODUCT: lambda a, b: a * b % modulus,
                ReduceOp.BAND: lambda a, b: a & b,
                ReduceOp.BOR: lambda a, b: a | b,
                ReduceOp.BXOR: lambda a, b: a ^ b,
            }[op](result, value)
        return result // size if op is ReduceOp.MEAN else result

    expected = [reduce_column(column) for column in zip(*rows, strict=True)]

    def run(backend: Backend) -> list[int]:
        mine = torch.tensor(rows[backend.rank], dtype=dtype)
        return phalanx.all_reduce(mine, backend, op, algorithm=algorithm).tolist()

    assert simulate(run, size) == [expected] * size


@pytest.mark.checkered
@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_mean_of_float16_does_not_overflow_on_the_way(algorithm: str, size: int) -> None:
    largest = torch.finfo(torch.float16).max

    def run(backend: Backend) -> list[Tensor | None]:
        mine = torch.tensor([largest, -60000, 40000.0 * (-1) ** backend.rank]).half()
        mine = torch.cat([mine, torch.tensor([torch.inf, 1.0 * backend.rank]).half()])
        option = {"algorithm": algorithm}
        return [
            phalanx.all_reduce(mine, backend, ReduceOp.MEAN, **option),  # type: ignore[arg-type]
            phalanx.all_reduce_(mine.clone(), backend, ReduceOp.MEAN, **option),  # type: ignore[arg-type]
            phalanx.reduce(mine, backend, 0, ReduceOp.MEAN, **option),  # type: ignore[arg-type]
        ]

    results = [result for each in simulate(run, size) for result in each if result is not None]
    expected = torch.tensor(
        [largest, -60000, 40000.0 * (size % 2) / size, torch.inf, (size - 1) / 2]
    )
    for result in results:
        assert same(result, results[0])
        torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=33.0)
    assert results[0][4] == (size - 1) / 2


@pytest.mark.checkered
@pytest.mark.parametrize("algorithm", ["direct", "star"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT])
def test_short_floats_that_meet_in_one_place_are_rounded_once(
    algorithm: str, dtype: torch.dtype, op: ReduceOp
) -> None:
    """Enough elements that they are folded in more than one block."""
    for size in (2, 7):
        values = [
            torch.linspace(0.5, 1.5, 70001, dtype=torch.float32).roll(r).to(dtype)
            for r in range(size)
        ]
        expected = reduced(values, op)
        results = simulate(
            lambda b, v=values: phalanx.all_reduce(v[b.rank], b, op, algorithm=algorithm), size
        )
        for result in results:
            assert same(result, expected)


def test_small_float16_numbers_keep_their_mean_where_it_is_rounded_once() -> None:
    """Numbers that a division on the way in would round to nothing."""

    def run(backend: Backend) -> Tensor:
        mine = torch.tensor([6e-8, 1.2e-7]).half()
        return phalanx.all_reduce(mine, backend, ReduceOp.MEAN)

    for size in (2, 3):
        for result in simulate(run, size):
            assert same(result, torch.tensor([6e-8, 1.2e-7]).half())


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_numbers_are_added_multiplied_and_averaged(
    algorithm: str, dtype: torch.dtype
) -> None:
    def run(backend: Backend) -> list[list[complex]]:
        mine = torch.tensor([1 + 1j * backend.rank, 2.0], dtype=torch.complex64).to(dtype)
        return [
            phalanx.all_reduce(mine, backend, op, algorithm=algorithm).to(torch.complex64).tolist()
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MEAN)
        ]

    for sum_, product, mean in simulate(run, 4):
        assert sum_ == [4 + 6j, 8]
        assert product == [(1 + 1j) * (1 + 2j) * (1 + 3j), 16]
        assert mean == [1 + 1.5j, 2]
