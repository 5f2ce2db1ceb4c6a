"""Ways to run a pipeline in a test, and the plain runs that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ddp_models import noise, seeded
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import Backend, Pipeline, PipelineParallelConfig

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]
SIZE = 6
Values = dict[str, Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def deep(layers: int = 12, seed: int = 0) -> nn.Sequential:
    """Linear layers and activations, every second one without parameters, some in place."""
    makers = [nn.Tanh, lambda: nn.ReLU(inplace=True), nn.GELU]

    def build() -> nn.Sequential:
        return nn.Sequential(
            *(nn.Linear(SIZE, SIZE) if n % 2 == 0 else makers[n // 2 % 3]() for n in range(layers))
        )

    model = seeded(build, seed)
    assert isinstance(model, nn.Sequential)
    return model


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return noise(rows, SIZE, seed=seed), noise(rows, SIZE, seed=seed + 1000)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)


def piped(
    backend: Backend,
    layers: Any,
    micro_batches: int = 4,
    schedule: str = "1f1b",
    **options: Any,
) -> Pipeline:
    config = PipelineParallelConfig(backend.world_size, micro_batches, schedule)
    return Pipeline(layers, backend, config, **options)


def train_plainly(
    model: nn.Module, optimizer: Optimizer, batches: list[Any], loss: Any = F.mse_loss
) -> tuple[list[float], Values]:
    """The losses of each step, and the parameters at the end."""
    chosen, losses = optimizer(model.parameters()), []
    for inputs, targets in batches:
        chosen.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        chosen.step()
        losses.append(value.item())
    return losses, dict(model.state_dict())


def train_piped(
    pipeline: Pipeline, optimizer: Optimizer, batches: list[Any], loss: Any = F.mse_loss
) -> tuple[list[float], Values]:
    """The same on one rank; only the parameters of this rank."""
    chosen = optimizer(pipeline.parameters()) if list(pipeline.parameters()) else None
    losses = []
    for inputs, targets in batches:
        pipeline.zero_grad()
        losses.append(pipeline.train_step(inputs, targets, loss).item())
        if chosen is not None:
            chosen.step()
    return losses, dict(pipeline.state_dict())


def assert_same_training(
    per_rank: list[tuple[list[float], Values]], plain: tuple[list[float], Values]
) -> None:
    """All ranks have the losses of the plain run, and together its parameters."""
    losses, values = plain
    together: Values = {}
    for theirs, part in per_rank:
        assert theirs == per_rank[0][0], "the same bits on every rank"
        assert not together.keys() & part.keys()
        together |= part
    torch.testing.assert_close(torch.tensor(per_rank[0][0]), torch.tensor(losses))
    assert together.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(together[name], value, msg=lambda text, name=name: name + text)
