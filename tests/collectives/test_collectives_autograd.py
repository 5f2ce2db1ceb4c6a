"""Collectives and autograd: parameters are taken like any tensor, and nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Backend, simulate

NEW: dict[str, Callable[[Tensor, Backend], object]] = {
    "reduce": lambda t, b: phalanx.reduce(t, b, 1),
    "gather": lambda t, b: phalanx.gather(t, b, 1),
    "scatter": lambda t, b: phalanx.scatter(t, b, 1),
    "all_to_all": phalanx.all_to_all,
    "all_to_all_uneven": lambda t, b: phalanx.all_to_all_uneven(t, b, [1, 1], [1, 1]),
    "all_reduce_coalesced": lambda t, b: phalanx.all_reduce_coalesced([t, t], b)[1],
    "all_gather_object": lambda t, b: phalanx.all_gather_object({"t": t}, b)[0]["t"],  # type: ignore[index]
    "broadcast_object": lambda t, b: phalanx.broadcast_object((t,), b)[0],  # type: ignore[index]
}
IN_PLACE: dict[str, Callable[[Tensor, Backend], object]] = {
    "reduce_": lambda t, b: phalanx.reduce_(t, b, 0),
    "all_reduce_coalesced_": lambda t, b: phalanx.all_reduce_coalesced_([t], b)[0],
    "broadcast_": lambda t, b: phalanx.broadcast_(t, b, 1),
    "into=": lambda t, b: phalanx.all_to_all(torch.ones(2, 3) + 4, b, into=t),
}


@pytest.mark.parametrize("call", NEW.values(), ids=NEW.keys())
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_result_is_a_plain_tensor_and_what_was_given_is_not_changed(
    call: Callable[[Tensor, Backend], object], mode: type[torch.no_grad]
) -> None:
    def run(backend: Backend) -> None:
        weight = nn.Parameter(torch.full((2, 3), 1.0 + backend.rank))
        with mode():
            for tensor in (weight, weight * 1, weight.t().contiguous().t()):
                result = call(tensor, backend)
                assert torch.equal(tensor.detach(), torch.full((2, 3), 1.0 + backend.rank))
                assert result is None or isinstance(result, Tensor)
                assert result is None or not result.requires_grad
                assert result is None or type(result) is Tensor
        (weight * weight).sum().backward()

    simulate(run, 2)


@pytest.mark.parametrize("call", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_what_is_overwritten_is_known_to_autograd(
    call: Callable[[Tensor, Backend], object],
) -> None:
    def run(backend: Backend) -> None:
        weight = nn.Parameter(torch.full((2, 3), 1.0 + backend.rank))
        loss = (weight * weight).sum()
        assert call(weight, backend) is weight
        assert weight.requires_grad
        assert weight.is_leaf
        if backend.rank == 0:
            assert weight[0, 0] != 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()  # type: ignore[no-untyped-call]

    simulate(run, 2)


def test_a_rank_whose_tensor_is_not_overwritten_may_go_on_with_its_graph() -> None:
    def run(backend: Backend) -> list[float]:
        weight = nn.Parameter(torch.ones(2))
        loss = (weight * weight).sum()
        phalanx.reduce_(weight, backend, 0)
        if backend.rank == 0:
            return []
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return weight.grad.tolist()

    assert simulate(run, 3) == [[], [2.0, 2.0], [2.0, 2.0]]


def test_memory_of_inference_mode_is_overwritten_too() -> None:
    def run(backend: Backend) -> None:
        with torch.inference_mode():
            mine = torch.ones(2, 3)
            for name in ("reduce_", "all_reduce_coalesced_", "broadcast_"):
                assert IN_PLACE[name](mine, backend) is mine

    simulate(run, 2)
