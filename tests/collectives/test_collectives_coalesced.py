"""all_reduce_coalesced: many tensors, of any dtypes and shapes, as if each was reduced alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clusters import Cluster, SharedMemory
from collective_reference import (
    algorithms,
    dtypes,
    exact_values,
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
from phalanx import Backend, DesyncError, MisuseError, ReduceOp, simulate
from phalanx import UnsupportedOperationError as Unsupported

PROMPT = 15.0  # seconds after which a rank that was not told gives up, with an error that shows it


@settings(max_examples=examples(60))
@given(
    sizes,
    algorithms,
    st.lists(st.tuples(shapes, dtypes), max_size=6),
    st.sampled_from([ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MEAN]),
    seeds,
)
def test_every_tensor_is_reduced_as_if_it_was_alone(
    size: int,
    algorithm: str,
    kinds: list[tuple[tuple[int, ...], torch.dtype]],
    op: ReduceOp,
    seed: int,
) -> None:
    values = [
        [exact_values(shape, dtype, op, rank, seed + n) for n, (shape, dtype) in enumerate(kinds)]
        for rank in range(size)
    ]
    expected = [reduced(list(each), op) for each in zip(*values, strict=True)]

    def run(backend: Backend) -> None:
        mine = [tensor.clone() for tensor in values[backend.rank]]
        strided = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in mine]
        inplace, later = [t.clone() for t in mine], [torch.stack([t, t], -1)[..., 1] for t in mine]
        pending = phalanx.async_all_reduce_coalesced(iter(mine), backend, op, algorithm=algorithm)
        also = phalanx.async_all_reduce_coalesced_(later, backend, op, algorithm=algorithm)
        results = phalanx.all_reduce_coalesced(strided, backend, op, algorithm=algorithm)
        placed = phalanx.all_reduce_coalesced_(inplace, backend, op, algorithm=algorithm)
        assert also.op_name == pending.op_name == "all_reduce_coalesced"
        assert all(one is two for one, two in zip(placed, inplace, strict=True))
        assert all(one is two for one, two in zip(also.wait(), later, strict=True))
        for tensor, before in zip(mine, values[backend.rank], strict=True):
            assert same(tensor, before)
        for listed in (results, pending.wait(), inplace, later):
            assert len(listed) == len(expected)
            for result, due in zip(listed, expected, strict=True):
                assert same(result, due)

    simulate(run, size, seed)


def test_results_are_tensors_of_their_own() -> None:
    def run(backend: Backend) -> None:
        first, second = phalanx.all_reduce_coalesced([torch.ones(2), torch.ones(1000)], backend)
        assert first.untyped_storage().nbytes() == first.nbytes
        first.zero_()
        assert second.sum() == 2000

    simulate(run, 2)


def test_nothing_is_reduced_to_nothing_and_keeps_the_ranks_in_step() -> None:
    def run(backend: Backend) -> list[Tensor]:
        assert phalanx.all_reduce_coalesced([], backend) == []
        pending = phalanx.async_all_reduce_coalesced_((), backend)
        assert pending.done()
        assert pending.wait() == []
        (result,) = phalanx.all_reduce_coalesced([torch.empty(0, 3)], backend)
        assert result.shape == (0, 3)
        return phalanx.all_reduce_coalesced([torch.ones(1), torch.ones(1).int()], backend)

    for float_, int_ in simulate(run, 3):
        assert (float_.tolist(), int_.tolist()) == ([3.0], [3])


def test_one_message_run_for_each_dtype_however_many_tensors() -> None:
    def run(backend: Backend) -> int:
        before = backend.finished
        tensors = [torch.ones(n, dtype=d) for n in range(9) for d in (torch.float32, torch.int64)]
        phalanx.all_reduce_coalesced(tensors, backend)
        return backend.finished - before

    assert simulate(run, 3) == [2] * 3


def test_reproducible_is_the_same_as_one_by_one() -> None:
    tensors = [[rough_values((n,), torch.float32, r, n) for n in (1, 30, 7)] for r in range(5)]

    def run(backend: Backend) -> None:
        mine = tensors[backend.rank]
        together = phalanx.all_reduce_coalesced(mine, backend, reproducible=True)
        in_place = [tensor.clone() for tensor in mine]
        phalanx.all_reduce_coalesced_(in_place, backend, reproducible=True)
        for tensor, result, placed in zip(mine, together, in_place, strict=True):
            alone = phalanx.all_reduce(tensor, backend, reproducible=True)
            assert same(result, alone)
            assert same(placed, alone)

    simulate(run, 5)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda b: phalanx.all_reduce_coalesced([torch.ones(1), None], b), TypeError),
        (lambda b: phalanx.all_reduce_coalesced(torch.ones(3), b), TypeError),
        (lambda b: phalanx.all_reduce_coalesced_(torch.ones(()), b), TypeError),
        (lambda b: phalanx.all_reduce_coalesced([torch.ones(1), torch.ones(1).bool()], b, MEAN),
         Unsupported),
        (lambda b: phalanx.all_reduce_coalesced([torch.ones(1)], b, "sum"), TypeError),
        (lambda b: phalanx.all_reduce_coalesced([torch.ones(1)], b, algorithm="x"), Unsupported),
        (lambda b: phalanx.all_reduce_coalesced([], b, algorithm="x"), Unsupported),
        (lambda b: phalanx.all_reduce_coalesced([torch.ones(1)], b, algorithm="ring",
                                                reproducible=True), Unsupported),
        (lambda b: phalanx.all_reduce_coalesced_([torch.ones(1).expand(3)], b), MisuseError),
    ],
)  # fmt: skip
def test_wrong_use_is_refused_before_anything_is_sent(
    call: Callable[[Backend], object], error: type[Exception]
) -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 0:
            with pytest.raises(error):
                call(backend)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 3) == [3.0] * 3


MEAN = ReduceOp.MEAN
LISTS: dict[str, tuple[list[Tensor], list[Tensor]]] = {
    "another order": ([torch.ones(2), torch.ones(3)], [torch.ones(3), torch.ones(2)]),
    "cut elsewhere": ([torch.ones(2), torch.ones(4)], [torch.ones(3), torch.ones(3)]),
    "one less": ([torch.ones(4)], [torch.ones(2), torch.ones(2)]),
    "another dtype later": (
        [torch.ones(4), torch.ones(1).int()],
        [torch.ones(4), torch.ones(1).long()],
    ),
    "an empty one more": ([torch.ones(4)], [torch.ones(4), torch.ones(0)]),
}


@pytest.mark.checkered
@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS.keys())
def test_ranks_with_other_lists_are_told(
    cluster: Cluster, lists: tuple[list[Tensor], list[Tensor]]
) -> None:
    def run(backend: Backend) -> None:
        with pytest.raises(DesyncError, match=r"2 tensors|1 tensors|met another"):
            phalanx.all_reduce_coalesced(lists[backend.rank], backend, algorithm="ring")

    cluster.run(run, 2, timeout=PROMPT)


def test_lists_of_nothing_whose_labels_differ_are_told_apart_where_memory_is_shared() -> None:
    """As soon as the ranks meet: of nothing there is no message that could tell."""

    def run(backend: Backend) -> None:
        phalanx.all_reduce_coalesced([], backend, label=f"of rank {backend.rank}")
        with pytest.raises(DesyncError, match=r"of rank 0.*\n.*of rank 1"):
            phalanx.barrier(backend)

    SharedMemory().run(run, 2)
