"""Training over real processes and sockets is training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    Pipeline,
    PipelineParallelConfig,
    ReduceOp,
    SharedMemoryBackend,
    TcpBackend,
    all_reduce,
)

T = TypeVar("T")

STEPS, ROWS = 10, 12


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(7))
    return inputs, inputs[:, :2].sin()


def train(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[float]:
    """SGD with momentum, by hand: with an optimizer of torch's every rank imports its compiler."""
    velocities = [torch.zeros_like(parameter) for parameter in model.parameters()]
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter, velocity in zip(model.parameters(), velocities, strict=True):
                assert parameter.grad is not None
                parameter.sub_(velocity.mul_(0.9).add_(parameter.grad), alpha=0.1)
        losses.append(loss.item())
    return losses


def train_on_my_rows(backend: Backend) -> tuple[list[float], list[float]]:
    model = DDP(build(), backend, bucket_size=1000)
    inputs, targets = (t.chunk(backend.world_size)[backend.rank] for t in data())
    losses = torch.tensor(train(model, inputs, targets))
    mean = all_reduce(losses, backend, ReduceOp.MEAN)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return mean.tolist(), weights.tolist()


def alone() -> tuple[list[float], list[float]]:
    model = build()
    losses = train(model, *data())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize(("ranks", "kind"), [(3, TcpBackend), (2, SharedMemoryBackend)])
def test_processes_train_like_one(ranks: int, kind: type[Backend]) -> None:
    results = returned(train_on_my_rows, ranks, kind)
    losses, weights = alone()
    for their_losses, their_weights in results:
        torch.testing.assert_close(torch.tensor(their_losses), torch.tensor(losses))
        torch.testing.assert_close(torch.tensor(their_weights), torch.tensor(weights))
    assert all(result == results[0] for result in results)  # bit for bit


def returned(fn: Callable[[Backend], T], ranks: int, kind: type[Backend]) -> list[T]:
    """What all ranks return."""
    outcomes = run_ranks(fn, ranks, kind=kind)
    assert {how for how, _ in outcomes} == {"returned"}, outcomes
    return [value for _, value in outcomes]


def train_my_stage(backend: Backend) -> tuple[float, list[list[float]]]:
    """One step of a pipeline of two stages, each in two replicas: DDP for one, FSDP for the other.

    The loss, and the gradients of this rank.
    """
    mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
    data_ranks, stage, layers = mesh["data"], mesh["stage"].rank, build()
    assert isinstance(layers, nn.Sequential)
    for number in ((0, 2), (4,))[stage]:
        layers[number] = (DDP, FSDP)[stage](layers[number], data_ranks)
    pipeline = Pipeline(layers, mesh["stage"], PipelineParallelConfig(2, 2))
    inputs, targets = (t.chunk(2)[data_ranks.rank] for t in data())
    loss = pipeline.train_step(inputs, targets, nn.functional.mse_loss)
    gradients = [p.grad.flatten().tolist() for p in pipeline.parameters() if p.grad is not None]
    return all_reduce(loss, data_ranks, ReduceOp.MEAN).item(), gradients


def test_four_processes_that_wrap_their_own_stages_have_the_gradients_of_one() -> None:
    model, (inputs, targets) = build(), data()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    expected = [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]
    ranks = returned(train_my_stage, 4, SharedMemoryBackend)
    (first, head), (_, tail), (again, other_head), (_, other_tail) = ranks
    assert first == again
    torch.testing.assert_close(first, loss.item())
    assert head == other_head  # bit for bit
    shards = [[*one, *other] for one, other in zip(tail, other_tail, strict=True)]
    for found, gradient in zip([*head, *shards], expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(gradient))
