"""Modules that compute with weights of their own making: functional_call, parametrize, MAML."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import assert_close, outcome_of
from fsdp_runs import COMMON, MESSAGES, alone, every_way, gradient_pieces, joined, on_ranks
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from phalanx import FSDP, Backend, MisuseError

RANKS = 2


class Constant(nn.Module):
    """A hypernetwork: the layer computes with what is given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Parameter(noise(3, 6, seed=5))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.layer, {"weight": self.given * 2}, (x,))


class Noisy(nn.Module):
    """Weight noise: it is made from the layer's own parameters, which are looked up by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        changed = {name: p * 5 + 1 for name, p in self.layer.named_parameters()}
        return functional_call(self.layer, changed, (x,))


class Adapted(nn.Module):
    """MAML: one step of gradient descent inside of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.layer.named_parameters())
        loss = self.layer(x).pow(2).mean()
        steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(own.items(), steps, strict=True)}
        return functional_call(self.layer, moved, (x,))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2 + 1


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for layer in (model[0], model[2]):
        parametrize.register_parametrization(layer, "weight", Halved())
    return model


def weight_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(noise(4, 6, seed=rank)).pow(2).mean()


@pytest.mark.checkered
@every_way()
@pytest.mark.parametrize("kind", [Constant, Noisy, Adapted, parametrized, weight_norm])
def test_gradients_are_those_of_one_process(strategy: Any, where: Any, kind: Any) -> None:
    def run(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, unit=type(model))
        for _ in range(2):
            fsdp.zero_grad()
            loss_of(fsdp, backend.rank).backward()
        return gradient_pieces(fsdp)

    found = joined(on_ranks(where, RANKS, lambda: seeded(kind), run))
    expected = alone(lambda: seeded(kind), [lambda m, r=r: loss_of(m, r) for r in range(RANKS)])
    assert_close(found, expected)


def test_parameters_of_the_wrapper_are_shards_inside_of_forward_too() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append([p.dim() for p in holder[0].parameters()])
            seen.append([p.dim() for p in self.parameters()])
            return super().forward(x)

    seen: list[list[int]] = []
    holder: list[FSDP] = []

    def run(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        if backend.rank == 0:
            holder.append(fsdp)
        fsdp(noise(2, 6))

    on_ranks(COMMON, 1, lambda: nn.Sequential(Looks(6, 3)), run)
    assert seen == [[1, 1], [2, 1]]


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
def test_a_unit_whose_weights_are_used_outside_is_refused_alike(where: Any) -> None:
    def run(model: nn.Module, backend: Backend) -> str:
        error = outcome_of(lambda: FSDP(model, backend, unit=nn.Linear)(noise(2, 6)))
        assert isinstance(error, MisuseError)
        return str(error)

    for message in on_ranks(where, RANKS, Noisy, run):
        assert "layer.weight was used while its parameter group (layer) was sharded" in message
        assert "pass a unit= that holds the parameter and every module that uses it" in message


def test_weights_that_are_given_from_outside_are_refused() -> None:
    def run(model: nn.Module, backend: Backend) -> str:
        fsdp = FSDP(model, backend)
        other = {"0.weight": torch.zeros(3, 6)}
        return str(outcome_of(lambda: functional_call(fsdp.module, other, (noise(2, 6),))))

    for message in on_ranks(COMMON, RANKS, lambda: nn.Sequential(nn.Linear(6, 3)), run):
        assert "functional_call() and parametrize belong inside the model" in message
