"""Wrong arguments of a collective are found before anything is sent, and cost the group nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import phalanx
from phalanx import Backend, ReduceOp, SizeMismatchError, UnsupportedOperationError, simulate

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
    ],
)
def test_an_algorithm_that_does_not_exist_is_refused_and_those_that_do_are_listed(
    call: Call,
) -> None:
    refused_on_rank_0_only(call, UnsupportedOperationError, "auto, ring, direct, tree")


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "star"])
def test_only_direct_is_reproducible(algorithm: str) -> None:
    refused_on_rank_0_only(
        lambda b: phalanx.all_reduce(ONES, b, algorithm=algorithm, reproducible=True),
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


MEANINGLESS = [
    (torch.bool, ReduceOp.SUM),
    (torch.bool, ReduceOp.MEAN),
    (torch.bool, ReduceOp.PRODUCT),
    (torch.complex64, ReduceOp.MIN),
    (torch.complex128, ReduceOp.MAX),
    (torch.float32, ReduceOp.BAND),
    (torch.bfloat16, ReduceOp.BXOR),
    (torch.complex64, ReduceOp.BOR),
    # What torch itself cannot compute on a CPU, as of 2.13:
    (torch.float8_e4m3fn, ReduceOp.SUM),
    (torch.float8_e5m2, ReduceOp.MAX),
    (torch.uint16, ReduceOp.SUM),
    (torch.uint32, ReduceOp.MIN),
    (torch.uint64, ReduceOp.MEAN),
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


def test_memory_on_another_device_is_refused() -> None:
    elsewhere = torch.empty(4, device="meta")
    for call in (phalanx.all_reduce, phalanx.all_gather, phalanx.broadcast):
        refused_on_rank_0_only(
            lambda b, c=call: c(elsewhere, b),  # type: ignore[misc]
            UnsupportedOperationError,
            "meta",
        )


def test_what_is_no_tensor_is_refused() -> None:
    for thing in (1.0, [1, 2], None):
        for call in (phalanx.all_reduce, phalanx.all_gather, phalanx.broadcast):
            refused_on_rank_0_only(
                lambda b, c=call, t=thing: c(t, b),  # type: ignore[misc]
                (TypeError, AttributeError),  # type: ignore[arg-type]
            )
