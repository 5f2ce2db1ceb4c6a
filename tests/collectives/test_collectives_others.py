"""all_gather, reduce_scatter, broadcast: on every rank what one process would compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from collective_reference import (
    algorithms,
    any_dtype,
    dtypes,
    exact_values,
    ops_for,
    reduced,
    rough_values,
    same,
    seeds,
    shapes,
    sizes,
    values_of,
)
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import phalanx
from phalanx import Backend, InvalidRankError, SizeMismatchError, simulate


@settings(max_examples=examples(120))
@given(sizes, algorithms, any_dtype, shapes, seeds)
def test_all_gather_joins_along_the_first_dimension_in_rank_order(
    size: int, algorithm: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> None:
    values = [values_of(shape, dtype, rank, seed) for rank in range(size)]
    expected = torch.cat(values) if shape else torch.stack(values)

    def run(backend: Backend) -> list[Tensor]:
        mine = values[backend.rank].clone()
        strided = torch.stack([mine, mine], dim=-1)[..., 0]
        into = torch.empty_like(expected)
        strided_into = torch.stack([expected, expected], dim=-1)[..., 1]
        pending = phalanx.async_all_gather(mine, backend, algorithm=algorithm)
        assert phalanx.all_gather(mine, backend, algorithm=algorithm, into=into) is into
        phalanx.all_gather(strided, backend, algorithm=algorithm, into=strided_into)
        result = phalanx.all_gather(strided, backend, algorithm=algorithm)
        assert same(mine, values[backend.rank])
        return [result, pending.wait(), into, strided_into]

    for results in simulate(run, size, seed):
        for result in results:
            assert same(result, expected)


@settings(max_examples=examples(40))
@given(sizes, algorithms, seeds)
def test_all_gather_into_memory_that_holds_the_input(size: int, algorithm: str, seed: int) -> None:
    """What sharded training does: this rank's slice is in its place already."""
    expected = rough_values((size * 3, 2), torch.float32, 0, seed)

    def run(backend: Backend) -> Tensor:
        full = torch.full_like(expected, torch.nan)
        mine = full[3 * backend.rank : 3 * backend.rank + 3]
        mine.copy_(expected[3 * backend.rank : 3 * backend.rank + 3])
        assert phalanx.all_gather(mine, backend, algorithm=algorithm, into=full) is full
        return full

    for result in simulate(run, size, seed):
        assert same(result, expected)


@settings(max_examples=examples(150))
@given(
    st.data(),
    sizes,
    algorithms,
    dtypes,
    st.integers(0, 5),
    st.sampled_from([(), (3,), (0,), (2, 2)]),
    seeds,
)
def test_reduce_scatter_gives_rank_i_slice_i_of_the_reduction(
    data: st.DataObject,
    size: int,
    algorithm: str,
    dtype: torch.dtype,
    rows: int,
    rest: tuple[int, ...],
    seed: int,
) -> None:
    op = data.draw(ops_for(dtype))
    shape = (size * rows, *rest)
    values = [exact_values(shape, dtype, op, rank, seed) for rank in range(size)]
    whole = reduced(values, op)

    def run(backend: Backend) -> None:
        expected = whole[backend.rank * rows : (backend.rank + 1) * rows]
        mine = values[backend.rank].clone()
        strided = torch.stack([mine, mine], dim=-1)[..., 0]
        into = torch.empty_like(expected)
        strided_into = torch.stack([expected, expected], dim=-1)[..., 1]
        pending = phalanx.async_reduce_scatter(mine, backend, op, algorithm=algorithm)
        assert phalanx.reduce_scatter(mine, backend, op, algorithm=algorithm, into=into) is into
        phalanx.reduce_scatter(strided, backend, op, algorithm=algorithm, into=strided_into)
        result = phalanx.reduce_scatter(strided, backend, op, algorithm=algorithm)
        assert same(mine, values[backend.rank])
        for each in (result, pending.wait(), into, strided_into):
            assert same(each, expected)

    simulate(run, size, seed)


@settings(max_examples=examples(40))
@given(sizes, algorithms, seeds)
def test_reduce_scatter_of_everything_is_all_reduce(size: int, algorithm: str, seed: int) -> None:
    """Of rough values: the slices, gathered, are one sum, whatever the order was."""

    def run(backend: Backend) -> tuple[Tensor, Tensor]:
        mine = rough_values((4 * size,), torch.float64, backend.rank, seed)
        part = phalanx.reduce_scatter(mine, backend, algorithm=algorithm)
        everything = phalanx.all_gather(part, backend, algorithm=algorithm)
        return everything, phalanx.all_reduce(mine, backend, algorithm=algorithm)

    results = simulate(run, size, seed)
    for gathered, total in results:
        assert same(gathered, results[0][0])
        torch.testing.assert_close(gathered, total)


@settings(max_examples=examples(120))
@given(st.data(), sizes, algorithms, any_dtype, shapes, seeds)
def test_broadcast_gives_every_rank_the_roots_bits(
    data: st.DataObject,
    size: int,
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
) -> None:
    root = data.draw(st.integers(0, size - 1))
    values = [values_of(shape, dtype, rank, seed) for rank in range(size)]

    def run(backend: Backend) -> list[Tensor]:
        mine = values[backend.rank].clone()
        strided = torch.stack([mine, mine], dim=-1)[..., 0]
        into, inplace = torch.empty_like(mine), mine.clone()
        strided_inplace = torch.stack([mine, mine], dim=-1)[..., 1]
        pending = phalanx.async_broadcast(mine, backend, root, algorithm=algorithm)
        assert phalanx.broadcast(mine, backend, root, algorithm=algorithm, into=into) is into
        assert phalanx.broadcast_(inplace, backend, root, algorithm=algorithm) is inplace
        phalanx.broadcast_(strided_inplace, backend, root, algorithm=algorithm)
        later = phalanx.async_broadcast_(mine2 := mine.clone(), backend, root, algorithm=algorithm)
        result = phalanx.broadcast(strided, backend, root, algorithm=algorithm)
        assert later.wait() is mine2
        assert same(mine, values[backend.rank])
        return [result, pending.wait(), mine2, into, inplace, strided_inplace]

    for results in simulate(run, size, seed):
        for result in results:
            assert same(result, values[root])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 4), (7, 0), (1, 4)])
def test_reduce_scatter_of_what_does_not_divide_is_refused_before_anything_is_sent(
    shape: tuple[int, ...],
) -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 1:
            with pytest.raises(SizeMismatchError, match=r"4 slices.*(pad|no) dim 0") as info:
                phalanx.reduce_scatter(torch.ones(shape), backend)
            assert (info.value.rank, info.value.op) == (1, "reduce_scatter")
            assert str(list(shape)) in str(info.value)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 4) == [4.0] * 4


@pytest.mark.parametrize("root", [3, -1, 100, None])
def test_a_root_that_does_not_exist_is_refused_before_anything_is_sent(root: int) -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 0:
            for call in (phalanx.broadcast, phalanx.broadcast_, phalanx.async_broadcast):
                with pytest.raises(InvalidRankError, match="root"):
                    call(torch.ones(2), backend, root)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 3) == [3.0] * 3


def test_a_scalar_of_each_rank_becomes_a_vector() -> None:
    gathered = simulate(lambda b: phalanx.all_gather(torch.tensor(b.rank), b), 4)
    assert [result.tolist() for result in gathered] == [[0, 1, 2, 3]] * 4


def test_nothing_stays_nothing_of_the_same_shape() -> None:
    def run(backend: Backend) -> list[tuple[int, ...]]:
        empty = torch.empty(0, 3)
        return [
            tuple(phalanx.all_gather(empty, backend).shape),
            tuple(phalanx.all_reduce(empty, backend).shape),
            tuple(phalanx.reduce_scatter(empty, backend).shape),
            tuple(phalanx.broadcast(empty, backend).shape),
        ]

    assert simulate(run, 4) == [[(0, 3)] * 4] * 4


@pytest.mark.parametrize(("size", "rows"), [(1, 2), (3, 0)])
@pytest.mark.parametrize(
    "call",
    [
        phalanx.all_reduce,
        phalanx.all_reduce_,
        phalanx.reduce,
        phalanx.reduce_scatter,
        phalanx.broadcast,
        phalanx.broadcast_,
        phalanx.all_gather,
        phalanx.gather,
        phalanx.scatter,
        phalanx.all_to_all,
        lambda tensor, backend: phalanx.async_all_reduce_(tensor, backend).wait(),
    ],
)
def test_where_nothing_is_to_be_moved_tensors_stay_on_their_device(
    call: Callable[[Tensor, Backend], Tensor | None], size: int, rows: int
) -> None:
    """As on a GPU by itself: the device here is one whose memory no message could read."""

    def run(backend: Backend) -> None:
        backend.devices = frozenset({"cpu", "meta"})
        result = call(torch.empty(rows, 5, device="meta"), backend)
        if result is not None:
            assert result.shape == (rows, 5)
            told = call is phalanx.scatter and backend.rank != 0  # by a tensor of no memory
            assert result.device.type == ("cpu" if told else "meta")

    simulate(run, size)
