"""The naive DDP is right by itself; DDP, trained beside it, has the same parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ddp_models import TASKS, Branches, loss_of, noise, seeded
from ddp_runs import assert_close, assert_same_bits, gradients, rows_of, values
from torch import Tensor, nn

from phalanx import DDP, Backend, simulate
from phalanx.parallel.naive_ddp import NaiveDDP


def train(model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    for number in range(5):
        inputs, targets = batch(number)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        if isinstance(model, NaiveDDP):
            model.average_gradients()
        optimizer.step()


@pytest.mark.checkered
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("task", TASKS)
def test_naive_training_is_training_in_one_process_on_the_joined_batch(task: str, world_size: int):
    build, batch = TASKS[task]

    def run(backend: Backend) -> dict[str, Tensor]:
        naive = NaiveDDP(build(seed=backend.rank), backend)
        train(naive, lambda number: [rows_of(part, backend) for part in batch(12, number)])
        return values(naive.module)

    plain = build(seed=0)
    train(plain, lambda number: batch(12, number))
    ranks = list(simulate(run, world_size))
    assert_same_bits(ranks)
    assert_close(ranks[0], values(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 150, 1 << 20])
@pytest.mark.parametrize("task", TASKS)
def test_ddp_trained_beside_it_has_the_same_parameters(task: str, bucket_size: int):
    build, batch = TASKS[task]

    def run(backend: Backend) -> dict[str, Tensor]:
        def mine(number: int) -> list[Tensor]:  # another one on each rank
            return list(batch(4, 10 * number + backend.rank))

        naive = NaiveDDP(build(seed=backend.rank), backend)
        ddp = DDP(build(seed=backend.rank), backend, bucket_size=bucket_size)
        train(naive, mine)
        train(ddp, mine)
        assert_close(values(ddp), values(naive.module), rtol=1e-5, atol=1e-6)
        return values(ddp)

    assert_same_bits(list(simulate(run, 3)))


def test_a_parameter_without_a_gradient_counts_as_zeros():
    def run(backend: Backend) -> None:
        names = ["left"] if backend.rank else ["left", "right"]
        naive = NaiveDDP(seeded(Branches), backend)
        ddp = DDP(seeded(Branches), backend, find_unused_parameters=True)
        for model in (naive, ddp):
            model(noise(2, 6, seed=backend.rank), *names).pow(2).sum().backward()
        naive.average_gradients()
        assert_close(gradients(ddp), gradients(naive.module))

    simulate(run, 2)
