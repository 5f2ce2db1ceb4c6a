"""Parameters that need no gradients, from the start or from some step on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import mlp, noise
from ddp_runs import assert_close
from fsdp_runs import (
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend

way = every_way()
FROZEN: dict[str, list[list[str]]] = {  # in each step, the parameters that do not learn
    "the first layer": [["0.weight", "0.bias"]] * 2,
    "a layer in the middle": [["2.weight", "2.bias"]] * 2,
    "the last layer": [["4.weight", "4.bias"]] * 2,
    "part of a layer": [["2.weight"], ["2.weight"]],
    "all but one": [["0.weight", "0.bias", "2.weight", "4.weight", "4.bias"]] * 2,
    "later": [[], ["0.weight", "0.bias", "4.weight"], ["2.bias"]],
    "no longer": [["0.weight", "0.bias", "4.weight"], [], []],
    "others in turn": [["0.weight"], ["2.weight", "2.bias"], ["0.weight"], []],
}


def train(model: nn.Module, frozen: list[list[str]], ranks: list[int]) -> None:
    """Steps, each with other parameters frozen; the loss is the mean over these ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for number, names in enumerate(frozen):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in names)
        optimizer.zero_grad()
        losses = [model(noise(4, 6, seed=10 * number + rank)).pow(2).sum() for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()


@pytest.mark.checkered
@way
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_frozen_parameters_stay_and_the_others_learn(
    frozen: list[list[str]], strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen[0])
        fsdp = FSDP(model, backend, strategy=strategy)
        train(fsdp, frozen, [backend.rank])
        assert [n for n, p in fsdp.named_parameters() if p.grad is not None] == [
            n for n, _ in fsdp.named_parameters() if n not in frozen[-1]
        ]
        return gradient_pieces(fsdp), fsdp.full_state_dict()

    plain = mlp()
    train(plain, frozen, [0, 1])
    found = on_ranks(where, 2, mlp, body)
    assert_close(
        joined([pieces for pieces, _ in found]),
        {name: p.grad for name, p in plain.named_parameters()},
    )
    for _, state in found:
        assert_close(state, plain.state_dict())


@way
def test_a_model_in_which_nothing_learns_passes_gradients_through(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> Tensor:
        fsdp = FSDP(model.requires_grad_(False), backend, strategy=strategy)
        x = noise(4, 6, seed=backend.rank).requires_grad_()
        fsdp(x).pow(2).sum().backward()
        assert all(p.grad is None for p in fsdp.parameters())
        assert x.grad is not None
        return x.grad

    plain = mlp()
    for rank, found in enumerate(on_ranks(where, 2, mlp, body)):
        x = noise(4, 6, seed=rank).requires_grad_()
        plain(x).pow(2).sum().backward()
        torch.testing.assert_close(found, x.grad)
