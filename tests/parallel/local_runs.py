"""Ranks that train by themselves now and then, and the same without ranks, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from ddp_models import loss_of, mlp, vectors
from torch import Tensor, nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Values = dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    """A step on the batch that this rank has in this step."""
    inputs, targets = vectors(4, seed=1000 * rank + number)
    optimizer.zero_grad()
    loss_of(model(inputs), targets).backward()
    optimizer.step()


def values(module: nn.Module) -> Values:
    """Copies of the plain module's parameters and buffers."""
    module = getattr(module, "module", module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def reference(
    ranks: int,
    syncs: Sequence[int],
    steps: int,
    *,
    inner: MakeOptimizer = sgd,
    outer: MakeOptimizer | None = None,
    make: Callable[[], nn.Module] = mlp,
) -> Values:
    """The plainest form: a model for each rank, and a mean written out. `syncs` are the numbers of
    the steps, counted from 1, after which there is one. Rank 0's values.
    """
    models = [make() for _ in range(ranks)]
    optimizers = [inner(list(model.parameters())) for model in models]
    center = deepcopy(models[0])
    outer_optimizer = outer(list(center.parameters())) if outer else None
    for number in range(1, steps + 1):
        for rank in range(ranks):
            take_step(models[rank], optimizers[rank], rank, number)
        if number not in syncs:
            continue
        with torch.no_grad():
            everyone = [list(model.parameters()) for model in models]
            for at, middle in enumerate(center.parameters()):
                mean = torch.stack([own[at] for own in everyone]).mean(0)
                middle.grad = middle - mean
                if outer_optimizer is None:
                    middle.copy_(mean)
            if outer_optimizer is not None:
                outer_optimizer.step()
            for model in models:
                for mine, middle in zip(model.parameters(), center.parameters(), strict=True):
                    mine.copy_(middle)
    return values(models[0])
