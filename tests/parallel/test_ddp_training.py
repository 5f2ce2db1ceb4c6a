"""Training over ranks is training in one process on the joined batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import TASKS, loss_of
from ddp_runs import assert_close, assert_same_bits, rows_of, values
from torch import nn

from phalanx import DDP, Backend, ReduceOp, all_reduce, simulate

ROWS = 12  # divisible by 1, 2, 3 and 4 ranks
STEPS = 5
Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    # A larger eps: with the default, Adam makes noise of gradients that are zero visible.
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
}


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, clip: float | None
) -> torch.Tensor:
    inputs, targets = batch
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach()


def train_alone(task: str, make: Optimizer, clip: float | None) -> tuple[list[float], Any]:
    build, batch = TASKS[task]
    model = build(0).train()
    optimizer = make(model.parameters())
    losses = [step(model, optimizer, batch(ROWS, seed), clip).item() for seed in range(STEPS)]
    return losses, values(model)


def train_on_ranks(
    task: str, make: Optimizer, clip: float | None, world_size: int, seed: int = 0, **options: Any
) -> list[tuple[list[float], Any]]:
    build, batch = TASKS[task]

    def run(backend: Backend) -> tuple[list[float], Any]:
        model = build(backend.rank).train()  # each rank starts elsewhere: rank 0's counts
        optimizer = make(model.parameters())
        before = list(model.parameters())
        ddp = DDP(model, backend, **options)
        losses = []
        for number in range(STEPS):
            mine = tuple(rows_of(part, backend) for part in batch(ROWS, number))
            losses.append(
                all_reduce(step(ddp, optimizer, mine, clip), backend, ReduceOp.MEAN).item()
            )
        assert all(a is b for a, b in zip(before, ddp.parameters(), strict=True))
        return losses, values(model)

    return list(simulate(run, world_size, seed))


def assert_trained_alike(ranks: list[tuple[list[float], Any]], alone: tuple[list[float], Any]):
    for losses, parameters in ranks:
        assert losses == pytest.approx(alone[0], rel=1e-4, abs=1e-6)
        assert_close(parameters, alone[1], rtol=1e-4, atol=1e-5)
    assert_same_bits([parameters for _, parameters in ranks])


@pytest.mark.checkered
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("task", TASKS)
def test_training_over_ranks_equals_training_in_one_process(task: str, world_size: int):
    make = OPTIMIZERS["SGD with momentum"]
    ranks = train_on_ranks(task, make, None, world_size)
    assert_trained_alike(ranks, train_alone(task, make, None))


@pytest.mark.checkered
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_it_does_so_for_every_optimizer_and_with_clipped_gradients(task: str, optimizer: str):
    make = OPTIMIZERS[optimizer]
    ranks = train_on_ranks(task, make, 0.05, 3, bucket_size=100)
    assert_trained_alike(ranks, train_alone(task, make, 0.05))


@pytest.mark.parametrize("task", TASKS)
def test_the_order_in_which_ranks_run_changes_no_bit(task: str):
    make = OPTIMIZERS["Adam"]
    runs = [train_on_ranks(task, make, 0.05, 3, seed) for seed in range(4)]
    assert_same_bits([parameters for run in runs for _, parameters in run])
    assert all(run[0][0] == runs[0][0][0] for run in runs)


@pytest.mark.parametrize("bucket_size", [1, 100, 400, 1 << 30])
def test_the_bucket_size_changes_the_result_by_rounding_only(bucket_size: int):
    make = OPTIMIZERS["SGD with momentum"]
    ranks = train_on_ranks("tied transformer", make, None, 4, bucket_size=bucket_size)
    assert_trained_alike(ranks, train_alone("tied transformer", make, None))


def test_an_optimizer_that_was_made_before_ddp_trains_the_same_parameters():
    build, batch = TASKS["mlp"]

    def run(backend: Backend) -> bool:
        model = build(backend.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = [p.data_ptr() for p in model.parameters()]
        ddp = DDP(model, backend)
        before = values(model)
        step(ddp, optimizer, batch(4, backend.rank), None)
        assert memory == [p.data_ptr() for p in ddp.parameters()]
        return all(not torch.equal(before[name], value) for name, value in values(model).items())

    assert list(simulate(run, 2)) == [True, True]
