"""all_reduce is what one process would compute, on every rank, however it is asked for."""

from __future__ import annotations

import pytest
import torch
from collective_reference import (
    FLOATS,
    algorithms,
    dtypes,
    exact_values,
    ops_for,
    reduced,
    rough_values,
    same,
    seeds,
    shapes,
    sizes,
)
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import phalanx
from phalanx import Backend, ReduceOp, simulate


@settings(max_examples=examples(250))
@given(st.data(), sizes, algorithms, dtypes, shapes, seeds)
def test_the_result_equals_a_single_process_and_the_input_is_not_changed(
    data: st.DataObject,
    size: int,
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
) -> None:
    op = data.draw(ops_for(dtype))
    expected = reduced([exact_values(shape, dtype, op, rank, seed) for rank in range(size)], op)

    def run(backend: Backend) -> Tensor:
        mine = exact_values(shape, dtype, op, backend.rank, seed)
        before = mine.clone()
        result = phalanx.all_reduce(mine, backend, op, algorithm=algorithm)
        assert same(mine, before)
        assert not result.numel() or result.data_ptr() != mine.data_ptr()
        return result

    for result in simulate(run, size, seed):
        assert same(result, expected)


@settings(max_examples=examples(60))
@given(sizes, algorithms, dtypes, shapes, seeds)
def test_every_form_gives_the_same_bits(
    size: int, algorithm: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> None:
    def run(backend: Backend) -> list[Tensor]:
        mine = rough_values(shape, dtype, backend.rank, seed)
        strided = torch.stack([mine, mine], dim=-1)[..., 0]
        into, strided_into = torch.empty_like(mine), torch.stack([mine, mine], dim=-1)[..., 1]
        inplace, strided_inplace = mine.clone(), torch.stack([mine, mine], dim=-1)[..., 1]
        pending_inplace = mine.clone()
        option = {"algorithm": algorithm}
        pending = phalanx.async_all_reduce(mine, backend, **option)  # type: ignore[arg-type]
        also = phalanx.async_all_reduce_(pending_inplace, backend, **option)  # type: ignore[arg-type]
        assert phalanx.all_reduce(mine, backend, into=into, **option) is into  # type: ignore[arg-type]
        result = phalanx.all_reduce(mine, backend, into=strided_into, **option)  # type: ignore[arg-type]
        assert result is strided_into
        assert phalanx.all_reduce_(inplace, backend, **option) is inplace  # type: ignore[arg-type]
        result = phalanx.all_reduce_(strided_inplace, backend, **option)  # type: ignore[arg-type]
        assert result is strided_inplace
        assert also.wait() is pending_inplace
        assert same(mine, rough_values(shape, dtype, backend.rank, seed))
        aliased = mine.clone()
        phalanx.all_reduce(aliased, backend, into=aliased, algorithm=algorithm)
        return [
            phalanx.all_reduce(strided, backend, algorithm=algorithm),
            pending.wait(),
            pending_inplace,
            into,
            strided_into,
            inplace,
            strided_inplace,
            aliased,
        ]

    results = [result for results in simulate(run, size, seed) for result in results]
    for result in results[1:]:
        assert same(result, results[0])


@settings(max_examples=examples(60))
@given(sizes, algorithms, st.sampled_from(FLOATS), st.integers(1, 50), seeds)
def test_a_sum_is_close_to_the_true_one_and_bit_identical_on_every_rank(
    size: int, algorithm: str, dtype: torch.dtype, count: int, seed: int
) -> None:
    values = [rough_values((count,), dtype, rank, seed) for rank in range(size)]
    truth = torch.stack(values).double().sum(0)
    scale = torch.stack(values).double().abs().sum(0)
    results = simulate(
        lambda backend: phalanx.all_reduce(values[backend.rank], backend, algorithm=algorithm), size
    )
    for result in results:
        assert same(result, results[0])
        assert ((result.double() - truth).abs() <= size * torch.finfo(dtype).eps * scale).all()


@settings(max_examples=examples(60))
@given(
    sizes,
    st.sampled_from(["auto", "direct"]),
    st.sampled_from(FLOATS),
    st.integers(0, 50),
    seeds,
    st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT]),
)
def test_reproducible_is_the_sum_in_rank_order_bit_for_bit(
    size: int, algorithm: str, dtype: torch.dtype, count: int, seed: int, op: ReduceOp
) -> None:
    values = [rough_values((count,), dtype, rank, seed) for rank in range(size)]
    expected = reduced(values, op)

    def run(backend: Backend) -> Tensor:
        mine = values[backend.rank]
        option = {"reproducible": True, "algorithm": algorithm}
        result = phalanx.all_reduce(mine, backend, op, **option)  # type: ignore[arg-type]
        inplace = phalanx.all_reduce_(mine.clone(), backend, op, **option)  # type: ignore[arg-type]
        assert same(result, inplace)
        return result

    for result in simulate(run, size, seed):
        assert same(result, expected)


def test_reproducible_does_not_depend_on_how_a_tensor_is_cut() -> None:
    values = [rough_values((97,), torch.float32, rank, 5) for rank in range(5)]

    def run(backend: Backend) -> tuple[Tensor, Tensor]:
        mine = values[backend.rank]
        pieces = [phalanx.all_reduce(p, backend, reproducible=True) for p in mine.split(10)]
        return phalanx.all_reduce(mine, backend, reproducible=True), torch.cat(pieces)

    for whole, pieces in simulate(run, 5):
        assert same(whole, pieces)


def test_a_mean_of_integers_is_cut_off_towards_zero() -> None:
    def run(backend: Backend) -> list[int]:
        mine = torch.tensor([[7, -7, 1, -1], [0, 0, 0, -1], [1, -1, 0, 0]][backend.rank])
        return phalanx.all_reduce(mine, backend, ReduceOp.MEAN).tolist()

    assert simulate(run, 3) == [[2, -2, 0, 0]] * 3


def test_min_and_max_give_nan_where_any_rank_has_nan() -> None:
    def run(backend: Backend) -> list[bool]:
        mine = torch.zeros(3)
        mine[backend.rank] = torch.nan
        both = [phalanx.all_reduce(mine, backend, op) for op in (ReduceOp.MIN, ReduceOp.MAX)]
        return [bool(result.isnan().all()) for result in both]

    assert simulate(run, 3) == [[True, True]] * 3


def test_infinities_survive() -> None:
    def run(backend: Backend) -> list[float]:
        mine = torch.tensor([torch.inf, 1.0 - backend.rank, -torch.inf])
        return phalanx.all_reduce(mine, backend, ReduceOp.MEAN).tolist()

    assert simulate(run, 3) == [[torch.inf, 0.0, -torch.inf]] * 3


def test_booleans_and_complex_numbers_are_reduced_where_that_means_something() -> None:
    def run(backend: Backend) -> tuple[list[bool], list[bool], list[complex]]:
        flags = torch.tensor([backend.rank == 0, True, False])
        return (
            phalanx.all_reduce(flags, backend, ReduceOp.BAND).tolist(),
            phalanx.all_reduce(flags, backend, ReduceOp.MAX).tolist(),
            phalanx.all_reduce(torch.tensor([1j + backend.rank]), backend, ReduceOp.MEAN).tolist(),
        )

    expected = ([False, True, False], [True, True, False], [1 + 1j])
    assert simulate(run, 3) == [expected] * 3


def test_parameters_that_require_a_gradient_are_reduced_like_any_tensor() -> None:
    def run(backend: Backend) -> None:
        weight = torch.nn.Parameter(torch.full((2, 3), float(backend.rank)))
        total = phalanx.all_reduce(weight, backend)
        assert not total.requires_grad
        assert weight[0, 0] == backend.rank
        saved = (weight * weight).sum()
        assert phalanx.all_reduce_(weight, backend) is weight
        assert weight.requires_grad
        assert weight.is_leaf
        assert torch.equal(weight.detach(), total)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()

    simulate(run, 3)


def test_inference_mode_and_no_grad_make_no_difference() -> None:
    def run(backend: Backend) -> None:
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                mine = torch.ones(4)
                assert phalanx.all_reduce_(mine, backend).tolist() == [3.0] * 4
                into = torch.empty(12)
                assert phalanx.all_gather(mine, backend, into=into).tolist() == [3.0] * 12

    simulate(run, 3)


def test_channels_last_and_transposed_tensors_keep_their_values() -> None:
    def run(backend: Backend) -> None:
        image = torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last)
        plain = torch.arange(48.0).reshape(2, 2, 3, 4)
        assert torch.equal(phalanx.all_reduce(image, backend), 3 * plain)
        assert torch.equal(phalanx.all_reduce_(image, backend), 3 * plain)
        assert image.is_contiguous(memory_format=torch.channels_last)

    simulate(run, 3)


def test_memory_that_overlaps_itself_is_refused_before_anything_is_sent() -> None:
    """Several elements in one place cannot hold several results."""

    def run(backend: Backend) -> None:
        expanded = torch.ones(1).expand(3)
        for call in (
            lambda: phalanx.all_reduce_(expanded, backend),
            lambda: phalanx.all_reduce(torch.ones(3), backend, into=expanded),
        ):
            if backend.rank == 0:
                with pytest.raises((RuntimeError, ValueError)):
                    call()
        assert phalanx.all_reduce(expanded, backend).tolist() == [2.0] * 3

    simulate(run, 2)
