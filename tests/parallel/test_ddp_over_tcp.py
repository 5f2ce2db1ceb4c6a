"""DDP over sockets: the same promises, with a thread that averages while backward computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import TASKS, Branches, loss_of, noise, seeded
from ddp_runs import (
    Gradients,
    Watched,
    assert_close,
    assert_same_bits,
    gradients,
    mean_of,
    naive_gradients,
    outcome_of,
    over_tcp,
    rows_of,
    values,
)
from torch import nn

from phalanx import DDP, Backend, DesyncError, MisuseError


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("task", TASKS)
def test_training_over_tcp_equals_training_in_one_process(task, world_size, bucket_size):
    build, batch = TASKS[task]

    def train(model: nn.Module, mine: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        for number in range(4):
            optimizer.zero_grad()
            inputs, targets = (mine(part) for part in batch(12, number))
            loss_of(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    models = [build(rank) for rank in range(world_size)]  # seeds are the process's: not in threads

    def run(backend: Backend):
        ddp = DDP(models[backend.rank], backend, bucket_size=bucket_size)
        train(ddp, lambda part: rows_of(part, backend))
        return values(ddp)

    plain = build(0)
    train(plain, lambda part: part)
    ranks = over_tcp(run, world_size)
    assert_same_bits(ranks)
    assert_close(ranks[0], values(plain), rtol=1e-4, atol=1e-5)


def test_large_gradients_overlap_with_backward_and_stay_equal():
    layers = 4
    models = [
        seeded(lambda: nn.Sequential(*(nn.Linear(300, 300) for _ in range(layers))), rank)
        for rank in range(2)
    ]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(models[backend.rank], backend, bucket_size=100_000)
        watched = Watched(backend)
        for number in range(3):
            ddp.zero_grad()
            watched.clear()
            ddp(noise(8, 300, seed=10 * number + backend.rank)).pow(2).sum().backward()
        assert watched.bytes_sent == layers * (300 * 300 + 300) * 4
        return gradients(ddp)

    expected = naive_gradients(
        lambda: seeded(lambda: nn.Sequential(*(nn.Linear(300, 300) for _ in range(layers)))),
        2,
        lambda model, rank: model(noise(8, 300, seed=20 + rank)).pow(2).sum().backward(),
    )
    ranks = over_tcp(run, 2)
    assert_same_bits(ranks)
    assert_close(ranks[0], expected)


def test_accumulation_and_unused_parameters_work_over_tcp():
    plan = [(["left"], ["right"]), (["left", "right"], ["left"]), ([], ["left"])]
    models = [seeded(Branches) for _ in range(2)]

    def step(model: nn.Module, rank: int, number: int) -> None:
        x = noise(4, 6, seed=10 * number + rank)
        model(x, *plan[number][rank]).pow(2).sum().backward()

    def run(backend: Backend) -> list[Gradients]:
        ddp = DDP(models[backend.rank], backend, bucket_size=1, find_unused_parameters=True)
        found = []
        for number in range(len(plan)):
            ddp.zero_grad()
            with ddp.no_sync():
                step(ddp, backend.rank, number)
            step(ddp, backend.rank, number)
            found.append(gradients(ddp))
        return found

    ranks = over_tcp(run, 2)
    for number in range(len(plan)):
        plain = [seeded(Branches) for _ in range(2)]
        for rank, model in enumerate(plain):
            step(model, rank, number)
            step(model, rank, number)
        assert_same_bits([found[number] for found in ranks])
        assert_close(ranks[0][number], mean_of([gradients(model) for model in plain]))


def test_unused_parameters_are_named_on_every_rank_without_waiting_for_a_timeout():
    models = [seeded(Branches) for _ in range(3)]

    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(models[backend.rank], backend)
        x = noise(4, 6)
        ddp(x, "left", "right").sum().backward()
        ddp.zero_grad()
        names = ["left"] if backend.rank == 2 else ["left", "right"]

        def second_step() -> None:
            backend.barrier()  # which a rank that is told while it leaves does not leave
            ddp(x, *names).sum().backward()

        return outcome_of(second_step)  # the timeout is an hour: who waits for it hangs this test

    for error in over_tcp(run, 3, timeout=3600.0):
        assert isinstance(error, MisuseError)
        assert "right.weight" in str(error)


def test_models_that_differ_are_told_apart_over_tcp():
    def run(backend: Backend) -> BaseException | None:
        return outcome_of(lambda: DDP(nn.Linear(4, 2 + (backend.rank == 1)), backend))

    for error in over_tcp(run, 3):
        assert isinstance(error, DesyncError)
        assert "rank 1 has weight (float32 [3, 4]), rank 0 has weight (float32 [2, 4])" in str(
            error
        )


def test_a_model_that_is_wrapped_again_is_averaged_once_over_tcp():
    models = [seeded(lambda: nn.Linear(300, 300)) for _ in range(2)]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(models[backend.rank], backend)
        del ddp
        ddp = DDP(models[backend.rank], backend, bucket_size=1)
        for number in range(5):
            ddp.zero_grad()
            ddp(noise(4, 300, seed=10 * number + backend.rank)).pow(2).sum().backward()
        return gradients(ddp)

    expected = naive_gradients(
        lambda: seeded(lambda: nn.Linear(300, 300)),
        2,
        lambda model, rank: model(noise(4, 300, seed=40 + rank)).pow(2).sum().backward(),
    )
    ranks = over_tcp(run, 2)
    assert_same_bits(ranks)
    assert_close(ranks[0], expected)
