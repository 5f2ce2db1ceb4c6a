"""Training over real processes and sockets is training in one process."""

from __future__ import annotations

import torch
from ranks import run_ranks
from torch import Tensor, nn

from phalanx import DDP, Backend, ReduceOp, all_reduce, spawn

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


def test_three_processes_train_like_one() -> None:
    outcomes = run_ranks(train_on_my_rows, 3)
    results = [value for how, value in outcomes if how == "returned"]
    assert len(results) == 3, outcomes
    losses, weights = alone()
    for their_losses, their_weights in results:
        torch.testing.assert_close(torch.tensor(their_losses), torch.tensor(losses))
        torch.testing.assert_close(torch.tensor(their_weights), torch.tensor(weights))
    assert results[0] == results[1] == results[2]  # bit for bit


def test_spawned_ranks_train_like_one() -> None:
    losses, weights = alone()
    for their_losses, their_weights in spawn(train_on_my_rows, 2):
        torch.testing.assert_close(torch.tensor(their_losses), torch.tensor(losses))
        torch.testing.assert_close(torch.tensor(their_weights), torch.tensor(weights))
