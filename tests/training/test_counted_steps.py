"""Steps are counted by what trains, for a program that logs none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from phalanx import (
    DDP,
    FSDP,
    AllReduceAggregator,
    Backend,
    DiLoCo,
    LocalSGD,
    ParameterServer,
    Pipeline,
    PipelineParallelConfig,
    distributed_train_step,
    simulate,
)
from phalanx.core.counters import Progress

Step = Callable[[], object]


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def wrapped(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Step:
    """A step on two micro-batches, of which the first one only accumulates."""
    model: Any = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.ones(2, 4)).mean().backward()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()

    return step


def accumulated(backend: Backend) -> Step:
    """All that DDP averages is of passes under `no_sync`."""
    model = DDP(nn.Linear(4, 1), backend)

    def step() -> None:
        with model.no_sync():
            model(torch.ones(2, 4)).mean().backward()
        model.sync_gradients()

    return step


def adversaries(backend: Backend) -> Step:
    """Two models, one of which has two steps while the other has one."""
    often, seldom = DDP(nn.Linear(4, 1), backend), DDP(nn.Linear(4, 1), backend)
    turns = count()

    def step() -> None:
        often(torch.ones(2, 4)).mean().backward()
        if next(turns) % 2:
            seldom(torch.ones(2, 4)).mean().backward()

    return step


def pipeline(backend: Backend) -> Step:
    """Each rank's layers are in DDP, too, which averages after each micro-batch."""
    alone = backend.subgroup([backend.rank])
    layers = [DDP(nn.Linear(4, 4), alone) for _ in range(2)]
    model = Pipeline(nn.Sequential(*layers), backend, PipelineParallelConfig(2, 4, "1f1b"))
    return lambda: model.train_step(torch.ones(8, 4), torch.ones(8, 4), F.mse_loss)


def aggregated(backend: Backend) -> Step:
    aggregator = AllReduceAggregator(backend)

    def compute() -> tuple[float, list[torch.Tensor]]:
        return 0.0, [torch.ones(3)]

    return lambda: distributed_train_step(compute, lambda averages: None, aggregator)


TRAINED: dict[str, Callable[[Backend], Step]] = {
    "DDP": lambda backend: wrapped(DDP, backend),
    "FSDP": lambda backend: wrapped(FSDP, backend),
    "LocalSGD": lambda backend: wrapped(lambda m, b: LocalSGD(m, b, every=2), backend),
    "DiLoCo": lambda backend: wrapped(lambda m, b: DiLoCo(m, b, every=2, outer=nesterov), backend),
    "sync_gradients": accumulated,
    "two models": adversaries,
    "Pipeline": pipeline,
    "distributed_train_step": aggregated,
}


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
def test_steps_are_counted_from_0_where_the_program_logs_none(
    trained: Callable[[Backend], Step],
) -> None:
    def run(backend: Backend) -> list[int]:
        step, progress = trained(backend), backend.progress
        numbers = [progress.latest.number]
        for _ in range(5):
            step()
            numbers.append(progress.latest.number)
        return numbers

    assert simulate(run, 2) == [[-1, 0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
def test_what_the_program_logs_counts_instead(trained: Callable[[Backend], Step]) -> None:
    def run(backend: Backend) -> list[int]:
        step, progress = trained(backend), backend.progress
        numbers = []
        for number in (100, 150):
            step()
            progress.log(number)
            step()
            numbers.append(progress.latest.number)
        return numbers

    assert simulate(run, 2) == [[100, 150]] * 2


def test_a_worker_counts_what_it_pushes_to_a_parameter_server() -> None:
    def run(backend: Backend) -> int:
        params = [torch.zeros(3)]
        if backend.rank == 0:
            ParameterServer.serve(params, backend, lambda p: torch.optim.SGD(p, lr=0.1))
        else:
            with ParameterServer.connect(params, backend) as client:
                for _ in range(3):
                    client.push([torch.ones(3)])
                    client.pull_()
        return backend.progress.latest.number

    assert simulate(run, 3) == [-1, 2, 2]


def test_a_step_that_fails_is_not_counted_and_the_next_one_is() -> None:
    progress = Progress(0, lambda: 1.0)
    with pytest.raises(ZeroDivisionError), progress.one_step(progress):
        raise ZeroDivisionError
    assert progress.latest.number == -1
    progress.count(progress)
    assert progress.latest.number == 0


def test_a_counted_step_takes_the_time_since_the_one_before() -> None:
    times = iter([10.0, 10.0, 14.0, 14.0])
    progress = Progress(0, lambda: next(times))
    told: list[float | None] = []
    for _ in range(2):
        progress.count(progress)
        told.append(progress.latest.seconds)
    assert told == [None, 4.0]
