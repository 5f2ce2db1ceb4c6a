"""Pipelines and their replicas in a test, and the plain runs that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ddp_models import seeded
from pipeline_runs import SIZE, piped
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    Pipeline,
    ShardingStrategy,
)
from phalanx.parallel.wrapper import Slice, slices_in

Wrap = Callable[[nn.Module, Backend], nn.Module]
WRAPS: dict[str, Wrap] = {
    "DDP": DDP,
    "FSDP": FSDP,
    "SHARD_GRAD_OP": lambda layer, data: FSDP(layer, data, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "both": lambda layer, data: (DDP if layer.weight[0, 0] > 0 else FSDP)(layer, data),  # type: ignore[operator, index]
    "NO_SHARD": lambda layer, data: FSDP(layer, data, strategy=ShardingStrategy.NO_SHARD),
}
IGNORED = -100
STEPS = [
    (3, 2, 5),
    (0, 4, 2),
    (0, 2, 3),
    (2, 0, 3),
    (4, 2, 0),
    (0, 0, 3),
]  # samples of each replica
Batch = tuple[Tensor, Tensor]


def model() -> nn.Sequential:
    def build() -> nn.Module:
        layers = (nn.Linear(SIZE, SIZE) if n % 2 == 0 else nn.Tanh() for n in range(12))
        return nn.Sequential(*layers)

    layers = seeded(build, 0).double()
    assert isinstance(layers, nn.Sequential)
    return layers


def batch(replica: int, samples: int, seed: int) -> Batch:
    """Some of the targets, in most of the samples, do not count."""
    draws = torch.Generator().manual_seed(100 * seed + replica)
    targets = torch.randint(SIZE, (samples, 3), generator=draws)
    ignored = torch.rand(samples, 3, generator=draws) < 0.4
    inputs = torch.randn(samples, 3, SIZE, generator=draws, dtype=torch.float64)
    return inputs, targets.masked_fill(ignored, IGNORED)


def tokens(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return nn.functional.cross_entropy(outputs, targets, reduction="sum", ignore_index=IGNORED)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def plainly(steps: Sequence[Sequence[int]]) -> tuple[list[Any], dict[str, Tensor]]:
    """Of each step the loss, the norm and the gradients, clipped; and the parameters at the end."""
    plain, found = model(), []
    optimizer = sgd(plain.parameters())
    for seed, sizes in enumerate(steps):
        parts = [batch(replica, samples, seed) for replica, samples in enumerate(sizes)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = sum_of_losses(plain(inputs), targets) / tokens(targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        gradients = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
        found.append((loss.item(), norm.item(), gradients))
        optimizer.step()
    return found, dict(plain.state_dict())


def replica_of(
    backend: Backend, wrap: Wrap, replicas: int, schedule: str = "1f1b", layers: Any = None
) -> tuple[Pipeline, DeviceMesh]:
    mesh = DeviceMesh(backend, (replicas, backend.world_size // replicas), ("data", "stage"))
    wrapped = [
        wrap(layer, mesh["data"]) if list(layer.parameters()) else layer
        for layer in layers or model()
    ]
    return piped(mesh["stage"], wrapped, 2, schedule, replicas=mesh["data"]), mesh


def step(
    pipeline: Pipeline, mesh: DeviceMesh, sizes: Sequence[int], seed: int, **given: Any
) -> Any:
    """One step, in which a replica without samples has no batch at all."""
    replica = mesh["data"].rank
    inputs, targets = batch(replica, sizes[replica], seed) if sizes[replica] else (None, None)
    weight = tokens(targets) if targets is not None else 0
    return pipeline.train_step(inputs, targets, sum_of_losses, weight=weight, **given)


def assert_near(found: Tensor, expected: Tensor, name: str = "") -> None:
    assert (found - expected).norm() <= 1e-12 * expected.norm(), name


def assert_parts(pipeline: Pipeline, whole: dict[str, Tensor], of: str = "grad") -> None:
    """This rank's parts of gradients, or of parameters, are those of whole ones."""
    parts = slices_in(pipeline)
    for name, parameter in pipeline.named_parameters():
        expected = whole[name].flatten()
        part = parts.get(parameter, Slice.whole(parameter.shape))
        found = parameter.grad if of == "grad" else parameter.detach()
        assert found is not None
        difference = found.flatten() - expected[part.start : part.stop]
        assert difference.norm() <= 1e-12 * expected.norm(), name


def sums_of_gradients(steps: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The sums of the plain model's gradients in these steps."""
    plain = model()
    for seed, sizes in enumerate(steps):
        parts = [batch(replica, samples, seed) for replica, samples in enumerate(sizes)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        (sum_of_losses(plain(inputs), targets) / tokens(targets)).backward()
    return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
