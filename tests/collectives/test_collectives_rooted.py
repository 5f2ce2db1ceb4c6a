"""reduce, gather, scatter: on the root, or from it, what one process would compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from collective_reference import (
    FLOATS,
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
from phalanx import (
    Backend,
    InvalidRankError,
    PendingCollective,
    ReduceOp,
    SizeMismatchError,
    simulate,
)

tree_or_star = st.sampled_from(["auto", "tree", "star"])
rests = st.sampled_from([(), (3,), (0,), (2, 2)])


def strided(tensor: Tensor) -> Tensor:
    """The same values in memory that is not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@settings(max_examples=examples(120))
@given(st.data(), sizes, algorithms, dtypes, shapes, seeds)
def test_reduce_gives_the_root_what_a_single_process_gets_and_the_others_none(
    data: st.DataObject,
    size: int,
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
) -> None:
    op = data.draw(ops_for(dtype))
    root = data.draw(st.integers(0, size - 1))
    values = [exact_values(shape, dtype, op, rank, seed) for rank in range(size)]
    expected = reduced(values, op)

    def run(backend: Backend) -> None:
        mine = values[backend.rank].clone()
        into, untouched = torch.full_like(mine, 1), torch.full_like(mine, 1)
        pending = phalanx.async_reduce(mine, backend, root, op, algorithm=algorithm)
        placed = phalanx.reduce(strided(mine), backend, root, op, algorithm=algorithm, into=into)
        result = phalanx.reduce(mine, backend, root, op, algorithm=algorithm)
        assert same(mine, values[backend.rank])
        if backend.rank == root:
            assert placed is into
            for each in (result, pending.wait(), into):
                assert each is not None
                assert same(each, expected)
            assert not mine.numel() or result is not None
        else:
            assert (result, placed, pending.wait()) == (None, None, None)
            assert same(into, untouched)

    simulate(run, size, seed)


@settings(max_examples=examples(60))
@given(st.data(), sizes, algorithms, st.sampled_from(FLOATS), shapes, seeds)
def test_reduce_in_place_overwrites_the_roots_tensor_only(
    data: st.DataObject,
    size: int,
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
) -> None:
    op = data.draw(st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]))
    root = data.draw(st.integers(0, size - 1))
    values = [rough_values(shape, dtype, rank, seed) for rank in range(size)]

    def run(backend: Backend) -> None:
        mine = values[backend.rank]
        option = {"algorithm": algorithm}
        result = phalanx.reduce(mine, backend, root, op, **option)  # type: ignore[arg-type]
        first, second = mine.clone(), strided(mine)
        assert phalanx.reduce_(first, backend, root, op, **option) is first  # type: ignore[arg-type]
        assert phalanx.async_reduce_(second, backend, root, op, **option).wait() is second  # type: ignore[arg-type]
        for tensor in (first, second):
            assert same(tensor, mine if result is None else result)

    simulate(run, size, seed)


@settings(max_examples=examples(40))
@given(st.data(), sizes, st.sampled_from(FLOATS), st.integers(0, 50), seeds)
def test_reproducible_reductions_sum_in_rank_order_bit_for_bit(
    data: st.DataObject, size: int, dtype: torch.dtype, count: int, seed: int
) -> None:
    op = data.draw(st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT]))
    root = data.draw(st.integers(0, size - 1))
    values = [rough_values((count * size,), dtype, rank, seed) for rank in range(size)]
    expected = reduced(values, op)

    def run(backend: Backend) -> None:
        mine, option = values[backend.rank], {"reproducible": True}
        whole = phalanx.reduce(mine, backend, root, op, **option)  # type: ignore[arg-type]
        part = phalanx.reduce_scatter(mine, backend, op, **option)  # type: ignore[arg-type]
        (listed,) = phalanx.all_reduce_coalesced([mine], backend, op, **option)  # type: ignore[arg-type]
        assert whole is None or same(whole, expected)
        assert same(part, expected[count * backend.rank : count * (backend.rank + 1)])
        assert same(listed, expected)

    simulate(run, size, seed)


@settings(max_examples=examples(80))
@given(st.data(), sizes, tree_or_star, any_dtype, shapes, seeds)
def test_gather_gives_the_root_all_tensors_in_rank_order(
    data: st.DataObject,
    size: int,
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
) -> None:
    root = data.draw(st.integers(0, size - 1))
    values = [values_of(shape, dtype, rank, seed) for rank in range(size)]
    expected = torch.cat(values) if shape else torch.stack(values)

    def run(backend: Backend) -> None:
        mine = values[backend.rank].clone()
        into, strided_into = torch.empty_like(expected), strided(torch.empty_like(expected))
        pending = phalanx.async_gather(mine, backend, root, algorithm=algorithm)
        option = {"algorithm": algorithm}
        phalanx.gather(mine, backend, root, into=into, **option)  # type: ignore[arg-type]
        phalanx.gather(mine, backend, root, into=strided_into, **option)  # type: ignore[arg-type]
        result = phalanx.gather(strided(mine), backend, root, algorithm=algorithm)
        assert same(mine, values[backend.rank])
        if backend.rank == root:
            for each in (result, pending.wait(), into, strided_into):
                assert each is not None
                assert same(each, expected)
        else:
            assert (result, pending.wait()) == (None, None)

    simulate(run, size, seed)


@settings(max_examples=examples(80))
@given(st.data(), sizes, tree_or_star, any_dtype, st.integers(0, 5), rests, seeds)
def test_scatter_gives_rank_i_slice_i_of_the_roots_tensor_whatever_the_others_show(
    data: st.DataObject,
    size: int,
    algorithm: str,
    dtype: torch.dtype,
    rows: int,
    rest: tuple[int, ...],
    seed: int,
) -> None:
    root = data.draw(st.integers(0, size - 1))
    whole = values_of((size * rows, *rest), dtype, 0, seed)

    def run(backend: Backend) -> None:
        expected = whole[backend.rank * rows : (backend.rank + 1) * rows]
        into, strided_into = torch.empty_like(expected), strided(torch.empty_like(expected))
        shown = {
            "the root's": whole.clone(),
            "any": torch.empty_like(whole),
            "meta": torch.empty_like(whole, device="meta"),
            "strided": strided(whole),
            "none": None,
        }
        if backend.rank == root:
            shown = dict.fromkeys(shown, shown["strided" if size % 2 else "the root's"])
        option = {"algorithm": algorithm}
        pending = phalanx.async_scatter(shown["the root's"], backend, root, **option)  # type: ignore[arg-type]
        results = [
            phalanx.scatter(shown["any"], backend, root, **option),  # type: ignore[arg-type]
            phalanx.scatter(shown["meta"], backend, root, **option),  # type: ignore[arg-type]
            phalanx.scatter(shown["strided"], backend, root, into=into, **option),  # type: ignore[arg-type]
            phalanx.scatter(shown["none"], backend, root, into=strided_into, **option),  # type: ignore[arg-type]
            pending.wait(),
        ]
        assert results[2] is into
        assert results[3] is strided_into
        for result in results:
            assert same(result, expected)
            assert result.untyped_storage().nbytes() <= 2 * expected.nbytes, "the rest is kept"
        if backend.rank == root:
            shown["any"].zero_()  # type: ignore[union-attr]
            assert same(results[0], expected), "a slice is memory of its own"

    simulate(run, size, seed)


@settings(max_examples=examples(30))
@given(st.data(), sizes, tree_or_star, seeds)
def test_gather_undoes_scatter_whoever_is_the_root(
    data: st.DataObject, size: int, algorithm: str, seed: int
) -> None:
    first, second = data.draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
    whole = rough_values((3 * size, 2), torch.float32, 0, seed)

    def run(backend: Backend) -> Tensor | None:
        part = phalanx.scatter(whole, backend, first, algorithm=algorithm)
        return phalanx.gather(part, backend, second, algorithm=algorithm)

    results = simulate(run, size, seed)
    assert same(results[second], whole)  # type: ignore[arg-type]
    assert [rank for rank, result in enumerate(results) if result is not None] == [second]


def test_the_roots_result_may_be_where_its_part_is() -> None:
    def run(backend: Backend) -> None:
        full = torch.arange(6.0) if backend.rank == 1 else torch.zeros(6)
        mine = full[2 * backend.rank : 2 * backend.rank + 2]
        phalanx.scatter(full, backend, 1, into=mine)
        assert mine.tolist() == [2.0 * backend.rank, 2.0 * backend.rank + 1]
        full[: 2 * backend.rank] = -1
        phalanx.gather(mine, backend, 2, into=full if backend.rank == 2 else None)
        if backend.rank == 2:
            assert full.tolist() == [0, 1, 2, 3, 4, 5]
        total = full.clone()
        phalanx.reduce(total, backend, 0, into=total)

    simulate(run, 3)


Call = Callable[[Tensor, Backend, int], object]
ROOTED_CALLS: dict[str, Call] = {
    "reduce": phalanx.reduce,
    "reduce_": phalanx.reduce_,
    "async_reduce": phalanx.async_reduce,
    "gather": phalanx.gather,
    "async_gather": phalanx.async_gather,
    "scatter": phalanx.scatter,
    "async_scatter": phalanx.async_scatter,
    "broadcast": phalanx.broadcast,
    "broadcast_object": phalanx.broadcast_object,
    "async_broadcast_object": phalanx.async_broadcast_object,
}


@pytest.mark.parametrize("call", ROOTED_CALLS.values(), ids=ROOTED_CALLS.keys())
@pytest.mark.parametrize("root", [3, -1, 1.0, None, "0"])
def test_a_root_that_does_not_exist_is_refused_before_anything_is_sent_to_it(
    call: Call, root: int
) -> None:
    def run(backend: Backend) -> float:
        if backend.rank != 1:
            with pytest.raises(InvalidRankError, match=r"rank \d: root .* ranks 0 to 2"):
                call(torch.ones(3), backend, root)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 3) == [3.0] * 3


@pytest.mark.parametrize("call", ROOTED_CALLS.values(), ids=ROOTED_CALLS.keys())
@pytest.mark.parametrize(
    "one", [True, np.int64(1), torch.tensor(1)], ids=["bool", "numpy", "torch"]
)
def test_any_integer_may_say_who_the_root_is(call: Call, one: int) -> None:
    """And it is the same root as the int that others give."""

    def run(backend: Backend) -> list[str]:
        results = []
        for root in (one, one if backend.rank else 1, 1 if backend.rank else one):
            result = call(torch.ones(4), backend, root)
            results.append(repr(result.wait() if isinstance(result, PendingCollective) else result))
            backend.barrier()
        return results

    def plain(backend: Backend) -> list[str]:
        result = call(torch.ones(4), backend, 1)
        return [repr(result.wait() if isinstance(result, PendingCollective) else result)] * 3

    assert simulate(run, 2) == simulate(plain, 2)


@pytest.mark.parametrize(
    ("give", "match"),
    [
        (lambda b: phalanx.scatter(None, b, b.rank), "the root gives the tensor"),
        (lambda b: phalanx.scatter(None, b, 1 - b.rank), r"cannot tell .*or into="),
        (lambda b: phalanx.scatter(torch.ones(3), b, 0), r"2 slices.*\[3\]"),
        (lambda b: phalanx.scatter(torch.ones(()), b, 0), r"2 slices.*\[\]"),
        (
            lambda b: phalanx.scatter(torch.ones(4), b, 0, into=torch.ones(4)),
            r"the result is .*\[2",
        ),
        (lambda b: phalanx.scatter(torch.ones(4), b, 1, into=torch.ones(2).int()), "the result is"),
        (lambda b: phalanx.scatter(None, b, 1 - b.rank, into=torch.ones(())), "the result is"),
        (lambda b: phalanx.gather(torch.ones(4), b, b.rank, into=torch.ones(4)), r"result.*\[8\]"),
        (lambda b: phalanx.reduce(torch.ones(4), b, b.rank, into=torch.ones(2)), "result is"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    give: Callable[[Backend], object], match: str
) -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 1:
            with pytest.raises(SizeMismatchError, match=match) as info:
                give(backend)
            assert info.value.rank == 1
            assert info.value.op in ("scatter", "gather", "reduce")
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 2) == [2.0] * 2


def test_the_others_may_give_into_on_every_rank_and_it_stays_as_it_is() -> None:
    def run(backend: Backend) -> list[float]:
        into = torch.zeros(3)
        phalanx.gather(torch.ones(1), backend, 1, into=into)
        phalanx.reduce(torch.ones(3), backend, 1, into=into)
        return into.tolist()

    assert simulate(run, 3) == [[0.0] * 3, [3.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("algorithm", ["tree", "star"])
def test_who_only_sends_need_not_wait_for_the_root(algorithm: str) -> None:
    def run(backend: Backend) -> list[float]:
        if backend.rank == 1:
            assert phalanx.reduce(torch.ones(2), backend, 0, algorithm=algorithm) is None
            assert phalanx.gather(torch.ones(2), backend, 0, algorithm=algorithm) is None
            backend.send(b"go", 0)
            return []
        backend.recv(bytearray(2), 1)
        total = phalanx.reduce(torch.ones(2), backend, 0, algorithm=algorithm)
        joined = phalanx.gather(torch.zeros(2), backend, 0, algorithm=algorithm)
        assert total is not None
        assert joined is not None
        return total.tolist() + joined.tolist()

    assert simulate(run, 2) == [[2.0, 2.0, 0.0, 0.0, 1.0, 1.0], []]
