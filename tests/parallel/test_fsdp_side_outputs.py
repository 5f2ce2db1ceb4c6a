"""A group may keep a loss of its own as an attribute: the backward pass comes in there first."""

from __future__ import annotations

import pytest
import torch
from clusters import CLUSTERS
from ddp_models import noise, seeded
from torch import Tensor, nn

from phalanx import FSDP, Backend


class Expert(nn.Module):
    """What it keeps is computed last, and so is what a backward pass begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.gate = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.up(x))
        self.kept = torch.tanh(self.gate(torch.tanh(self.gate(x)))).square().mean()
        return x + out


def experts() -> nn.Sequential:
    return nn.Sequential(Expert(), Expert(), Expert())


def step(model: nn.Module, inner: nn.Sequential, x: Tensor) -> None:
    loss = model(x).square().mean()
    for expert in inner:
        loss = loss + expert.kept
    loss.backward()


@pytest.mark.parametrize("name", ["tcp", "shm"])
def test_a_backward_pass_that_comes_in_by_an_attribute_finds_the_group_unsharded(name: str) -> None:
    expected, x = seeded(experts), noise(4, 6)
    models = [seeded(experts) for _ in range(2)]
    for _ in range(3):
        step(expected, expected, x)

    def run(backend: Backend) -> list[Tensor]:
        model = FSDP(models[backend.rank], backend)
        for _ in range(3):
            step(model, models[backend.rank], x)
        return [p.grad for p in model.parameters()]

    first, second = next(c for c in CLUSTERS if c.name == name).run(run, 2)
    for parts, parameter in zip(
        zip(first, second, strict=True), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(torch.cat(parts), parameter.grad.reshape(-1))


@pytest.mark.parametrize("name", ["tcp", "shm"])
def test_an_output_that_is_a_view_may_be_written_in_place(name: str) -> None:
    """That of nn.Linear with three dimensions is one: the write gives it another node."""

    def gradients(model: nn.Module) -> list[Tensor]:
        model(noise(2, 3, 6).requires_grad_()).relu_().sum().backward()
        return [p.grad for p in model.parameters()]

    models = [seeded(lambda: nn.Linear(6, 6)) for _ in range(3)]
    plain = gradients(models[2])
    cluster = next(c for c in CLUSTERS if c.name == name)
    ranks = cluster.run(lambda backend: gradients(FSDP(models[backend.rank], backend)), 2)
    for *parts, whole in zip(*ranks, plain, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole.reshape(-1))
