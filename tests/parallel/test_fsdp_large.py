"""Groups of more than a mebibyte: in shared memory gradients are reduced from where they are."""

from __future__ import annotations

import pytest
import torch
from clusters import CLUSTERS
from ddp_models import noise, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import FSDP, Backend
from phalanx.fsdp.gradients import LARGE

WIDTH = 380
BY_NAME = {cluster.name: cluster for cluster in CLUSTERS}


def layers() -> nn.Module:
    """One group of two layers, whose parameters lie across the borders of shards."""
    both = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    assert sum(p.nbytes for p in both.parameters()) > LARGE
    return nn.Sequential(both)


def twice(module: nn.Module, x: Tensor) -> Tensor:
    return module(module(x))


@pytest.mark.checkered
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["shm", "sub of shm", "tcp"])
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["", "mixed precision"])
def test_gradients_of_large_groups_equal_those_of_the_plain_model(
    size: int, name: str, mixed: torch.dtype | None
) -> None:
    batch = noise(size * 2, WIDTH)
    expected = seeded(layers)
    (twice(expected, batch).square().sum() / size).backward()

    models = [seeded(layers) for _ in range(size)]

    def run(backend: Backend) -> list[Tensor]:
        model = FSDP(models[backend.rank], backend, mixed_precision=mixed)
        rows = batch[2 * backend.rank : 2 * backend.rank + 2]
        for _ in range(2):  # the second adds to the first
            twice(model, rows).float().square().sum().backward()
        return [p.grad for p in model.parameters()]

    parts = BY_NAME[name].run(run, size)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if mixed is None else {"rtol": 0.1, "atol": 0.2}
    for number, parameter in enumerate(expected.parameters()):
        whole = torch.cat([rank[number] for rank in parts])
        torch.testing.assert_close(whole, 2 * parameter.grad.reshape(-1), **tolerance)


class Checkpointed(nn.Module):
    """Its second layer computes twice, each time in a checkpoint; so that has two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.two(y)), x, use_reentrant=True)
        return x


@pytest.mark.parametrize("name", ["shm", "simulated", "tcp"])
def test_a_second_gradient_of_a_parameter_is_added_to_the_first_wherever_that_is(name: str) -> None:
    size = 2
    batch = noise(size * 2, WIDTH)

    def build() -> nn.Module:
        return seeded(lambda: nn.Sequential(Checkpointed()))

    expected = build()
    (expected(batch.clone().requires_grad_()).square().sum() / size).backward()
    models = [build() for _ in range(size)]

    def run(backend: Backend) -> list[Tensor]:
        model = FSDP(models[backend.rank], backend)
        rows = batch[2 * backend.rank : 2 * backend.rank + 2].clone().requires_grad_()
        model(rows).square().sum().backward()
        return [p.grad for p in model.parameters()]

    parts = BY_NAME[name].run(run, size)
    for number, parameter in enumerate(expected.parameters()):
        whole = torch.cat([rank[number] for rank in parts])
        torch.testing.assert_close(whole, parameter.grad.reshape(-1), rtol=1e-4, atol=1e-4)
