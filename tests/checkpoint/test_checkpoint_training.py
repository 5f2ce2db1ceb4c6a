"""Training that is saved, and goes on with another number of ranks, is the training it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import small
from torch import Tensor, nn

import phalanx
from phalanx import DDP, Backend, load_checkpoint, save_checkpoint

ROWS = 12  # of each batch, all ranks together


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 3, generator=generator), torch.randn(ROWS, 2, generator=generator)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def adam_by_a_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)


def train(
    model: nn.Module, optimizer: Any, schedule: Any, first: int, last: int, rank: int, ranks: int
) -> list[Tensor]:
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    for step in range(first, last):
        inputs, targets = (each[mine] for each in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("optimizer_of", [momentum, adam, adam_by_a_tensor])
def test_training_goes_on_as_if_it_had_never_stopped(optimizer_of: Any, folder: Path) -> None:
    def going_on(model: nn.Module) -> tuple[Any, Any]:
        optimizer = optimizer_of(model)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

    def stretch(first: int, last: int) -> Any:
        def run(backend: Backend) -> list[Tensor]:
            model = DDP(small(seed=first), backend)
            optimizer, schedule = going_on(model)
            if first > 0:
                loaded = load_checkpoint(folder, model=model, optimizer=optimizer)
                assert loaded.step == first
                schedule.load_state_dict(loaded.extra)
            result = train(
                model, optimizer, schedule, first, last, backend.rank, backend.world_size
            )
            save_checkpoint(
                folder, model=model, optimizer=optimizer, step=last, extra=schedule.state_dict()
            )
            return result

        return run

    plain = small(seed=0)
    expected = train(plain, *going_on(plain), 0, 9, 0, 1)
    phalanx.simulate(stretch(0, 2), 2)
    phalanx.simulate(stretch(2, 5), 4)
    phalanx.simulate(stretch(5, 6), 1)
    for result in phalanx.simulate(stretch(6, 9), 3):
        torch.testing.assert_close(result, expected)
