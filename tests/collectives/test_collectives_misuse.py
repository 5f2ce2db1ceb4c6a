"""Wrong arguments of a collective are found before anything is sent, and cost the group nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import phalanx
from phalanx import (
    Backend,
    ReduceOp,
    SimulatedBackend,
    SizeMismatchError,
    UnsupportedOperationError,
    simulate,
)

ONES = torch.ones(4)
Call = Callable[[Backend], object]


def refused_on_rank_0_only(call: Call, error: type[Exception], match: str | None = None) -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 0:
            with pytest.raises(error, match=match):
                call(backend)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert simulate(run, 3) == [3.0] * 3


@pytest.mark.parametrize(
    "call",
    [
        lambda b: phalanx.all_reduce(ONES, b, algorithm="rings"),
        lambda b: phalanx.all_reduce_(ONES.clone(), b, algorithm=""),
        lambda b: phalanx.all_gather(ONES, b, algorithm="RING"),
        lambda b: phalanx.broadcast(ONES, b, algorithm="all_reduce"),
        lambda b: phalanx.async_reduce_scatter(torch.ones(3), b, algorithm="none"),
        lambda b: phalanx.reduce(ONES, b, algorithm="two"),
        lambda b: phalanx.async_reduce_(ONES, b, algorithm="pairwise"),
        lambda b: phalanx.all_reduce_coalesced([ONES], b, algorithm="rings"),
    ],
)
def test_an_algorithm_that_does_not_exist_is_refused_and_those_that_do_are_listed(
    call: Call,
) -> None:
    refused_on_rank_0_only(call, UnsupportedOperationError, "auto, ring, direct, tree")


@pytest.mark.parametrize(
    ("call", "listed"),
    [
        (lambda b: phalanx.gather(ONES, b, algorithm="ring"), "auto, tree, star"),
        (lambda b: phalanx.scatter(torch.ones(3), b, algorithm="ring"), "auto, tree, star"),
        (lambda b: phalanx.all_to_all(torch.ones(3), b, algorithm="ring"), "direct, pairwise"),
        (
            lambda b: phalanx.all_to_all_uneven(ONES[:3], b, [1] * 3, [1] * 3, algorithm="ring"),
            "direct, pairwise",
        ),
    ],
)
def test_so_is_one_that_another_collective_has(call: Call, listed: str) -> None:
    refused_on_rank_0_only(call, UnsupportedOperationError, f"rank 0: .*it has .*{listed}")


NOT_A_BACKEND: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda b: phalanx.all_reduce(ONES, b),
    "broadcast": lambda b: phalanx.broadcast(ONES, b),
    "broadcast_": lambda b: phalanx.broadcast_(ONES, b),
    "gather": lambda b: phalanx.gather(ONES, b),
    "reduce": lambda b: phalanx.reduce(ONES, b),
    "reduce_": lambda b: phalanx.reduce_(ONES, b),
    "all_to_all": lambda b: phalanx.all_to_all(ONES, b),
    "all_reduce_coalesced": lambda b: phalanx.all_reduce_coalesced([ONES], b),
}


@pytest.mark.parametrize("name", NOT_A_BACKEND)
def test_what_is_no_backend_is_said_to_be_none(name: str) -> None:
    call = rf"{name}\(tensor, backend, \.\.\.\)"
    with pytest.raises(TypeError, match=f"^{call} takes the backend second, not str$"):
        NOT_A_BACKEND[name]("gloo")


WRONG_TYPES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a list": (lambda b: phalanx.all_reduce_([1, 2], b), "all_reduce_ takes a tensor, not list"),  # type: ignore[arg-type]
    "into": (lambda b: phalanx.all_reduce(ONES, b, into=[1]), "into= takes a tensor, not list"),  # type: ignore[arg-type]
    "no list": (lambda b: phalanx.all_reduce_coalesced(3, b), "takes a list of tensors, not int"),  # type: ignore[arg-type]
    "one tensor": (lambda b: phalanx.all_reduce_coalesced(ONES, b), "of tensors, not one tensor"),
}


@pytest.mark.parametrize(("call", "words"), WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_an_argument_of_a_wrong_type_is_named(call: Call, words: str) -> None:
    refused_on_rank_0_only(call, TypeError, f"rank 0: .*{words}")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cut", [phalanx.reduce_scatter, phalanx.scatter, phalanx.all_to_all])
def test_a_tensor_of_no_dimensions_is_cut_in_no_world(cut: Callable[..., Any], size: int) -> None:
    def run(backend: Backend) -> None:
        with pytest.raises(SizeMismatchError, match=rf"{size} slices.*shape \[\]; it has no dim 0"):
            cut(torch.tensor(1.0), backend)

    simulate(run, size)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "star"])
def test_only_direct_is_reproducible(algorithm: str) -> None:
    refused_on_rank_0_only(
        lambda b: phalanx.all_reduce(ONES, b, algorithm=algorithm, reproducible=True),
        UnsupportedOperationError,
        f"rank order, which '{algorithm}' does not",
    )
    for call in (phalanx.reduce, phalanx.reduce_, phalanx.reduce_scatter):
        refused_on_rank_0_only(
            lambda b, c=call: c(torch.ones(3), b, algorithm=algorithm, reproducible=True),  # type: ignore[misc]
            UnsupportedOperationError,
            f"rank order, which '{algorithm}' does not",
        )


@pytest.mark.parametrize("op", ["sum", None, 3, torch.add])
def test_a_reduction_is_a_reduce_op(op: object) -> None:
    refused_on_rank_0_only(
        lambda b: phalanx.all_reduce(ONES, b, op),  # type: ignore[arg-type]
        TypeError,
        "op must be one of ReduceOp.SUM",
    )


def test_a_backend_that_is_not_where_it_belongs_is_missed_by_name() -> None:
    with SimulatedBackend.create_group(1)[0] as backend:
        swapped: Any = phalanx.all_reduce
        call = r"rank 0: all_reduce\(tensor, backend, \.\.\.\)"
        with pytest.raises(TypeError, match=f"^{call} takes the backend second, not Tensor$"):
            swapped(backend, ONES)
        with pytest.raises(TypeError, match=r"not 'sum': ReduceOp\.SUM\?"):
            swapped(ONES, backend, "sum")


MEANINGLESS = [
    (torch.bool, ReduceOp.MEAN),
    (torch.complex64, ReduceOp.MIN),
    (torch.complex128, ReduceOp.MAX),
    (torch.float32, ReduceOp.BAND),
    (torch.bfloat16, ReduceOp.BXOR),
    (torch.complex64, ReduceOp.BOR),
    # What torch itself cannot compute on a CPU, as of 2.13, and too coarse to be added up:
    (torch.float8_e4m3fn, ReduceOp.SUM),
    (torch.float8_e5m2, ReduceOp.MAX),
]


@pytest.mark.parametrize(("dtype", "op"), MEANINGLESS, ids=str)
def test_a_reduction_without_meaning_for_a_dtype_is_refused(
    dtype: torch.dtype, op: ReduceOp
) -> None:
    values = torch.zeros(6, dtype=dtype)
    for call in (phalanx.all_reduce, phalanx.all_reduce_, phalanx.reduce_scatter):
        refused_on_rank_0_only(lambda b, c=call: c(values, b, op), UnsupportedOperationError)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "into"),
    [
        (phalanx.all_reduce, torch.empty(5)),
        (phalanx.all_reduce, torch.empty(2, 2)),
        (phalanx.all_reduce, torch.empty(4, dtype=torch.float64)),
        (phalanx.all_gather, torch.empty(4)),
        (phalanx.all_gather, torch.empty(3, 4)),
        (phalanx.broadcast, torch.empty(1, 4)),
        (phalanx.broadcast, torch.empty(4, dtype=torch.int32)),
    ],
)
def test_memory_for_the_result_that_does_not_fit_is_refused_naming_both(
    call: Callable[..., object], into: torch.Tensor
) -> None:
    refused_on_rank_0_only(
        lambda b: call(ONES, b, into=into),
        SizeMismatchError,
        rf"into= is {into.dtype} .*, the result is torch.float32 \[",
    )


TENSOR_CALLS: dict[str, Callable[..., object]] = {
    "all_reduce": phalanx.all_reduce,
    "all_reduce_": phalanx.all_reduce_,
    "all_gather": phalanx.all_gather,
    "broadcast": phalanx.broadcast,
    "broadcast_": phalanx.broadcast_,
    "reduce": phalanx.reduce,
    "reduce_": phalanx.reduce_,
    "reduce_scatter": phalanx.reduce_scatter,
    "gather": phalanx.gather,
    "scatter": phalanx.scatter,
    "all_to_all": phalanx.all_to_all,
    "all_to_all_uneven": lambda t, b: phalanx.all_to_all_uneven(t, b, [1] * 3, [1] * 3),
    "all_reduce_coalesced": lambda t, b: phalanx.all_reduce_coalesced([t], b),
    "all_reduce_coalesced_": lambda t, b: phalanx.all_reduce_coalesced_([t], b),
}


@pytest.mark.parametrize("call", TENSOR_CALLS.values(), ids=TENSOR_CALLS.keys())
@pytest.mark.filterwarnings("ignore:Sparse")
def test_only_dense_tensors_of_the_processor_are_taken(call: Callable[..., object]) -> None:
    for tensor, match in (
        (torch.empty(3, device="meta"), r"rank 0: .* meta; move it with \.cpu"),
        (torch.ones(3).to_sparse(), r"rank 0: .* torch\.sparse_coo one; convert it"),
    ):
        refused_on_rank_0_only(
            lambda b, t=tensor: call(t, b),  # type: ignore[misc]
            UnsupportedOperationError,
            match,
        )


@pytest.mark.parametrize("call", TENSOR_CALLS.values(), ids=TENSOR_CALLS.keys())
def test_what_is_no_tensor_is_refused(call: Callable[..., object]) -> None:
    for thing, name in ((1.0, "float"), ([1, 2, 3], "list"), ("abc", "str")):
        refused_on_rank_0_only(
            lambda b, t=thing: call(t, b),  # type: ignore[misc]
            TypeError,
            f"rank 0: .* takes a tensor, not {name}",
        )


@pytest.mark.parametrize("call", [phalanx.all_reduce, phalanx.all_gather, phalanx.broadcast])
def test_the_result_goes_to_a_tensor_of_the_processor(call: Callable[..., object]) -> None:
    refused_on_rank_0_only(
        lambda b: call(ONES, b, into=torch.empty(4, device="meta")),
        UnsupportedOperationError,
        "meta",
    )
    refused_on_rank_0_only(lambda b: call(ONES, b, into=[0.0] * 4), TypeError, "not list")
