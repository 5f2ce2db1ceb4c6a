"""A training step that is timed is checked, and what is not training together shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import phalanx
from phalanx import DDP, Backend
from phalanx.ops.bench.operations import (
    OPERATIONS,
    OPTIMIZERS,
    STEPS,
    TASKS,
    TrainedModel,
    TrainingStep,
    TrainingTask,
    replicated,
    task_of,
)
from phalanx.ops.bench.peers import Alone, Peer, Phalanx, RankContext
from phalanx.ops.bench.rank import time_rounds

WIDTH = 24


def wrong_on_ranks(
    wrap: Callable[[Backend], Callable[[nn.Module], TrainedModel]],
    calls: int,
    then: Callable[[nn.Module, Backend], None] = lambda model, backend: None,
) -> list[int]:
    """What each of two ranks finds wrong after so many steps of "ddp"."""

    def rank(backend: Backend) -> int:
        made: list[nn.Module] = []

        def keep(model: nn.Module) -> TrainedModel:
            made.append(model)
            return wrap(backend)(model)

        task, ranks = task_of("ddp", WIDTH), range(backend.world_size)
        step = TrainingStep(task, keep, rank=backend.rank, ranks=ranks)
        step.load()
        for _ in range(calls):
            step.call()
        with torch.no_grad():
            then(made[0], backend)
        return step.count_wrong(3)

    return list(phalanx.simulate(rank, 2))


def together(backend: Backend) -> Callable[[nn.Module], TrainedModel]:
    return lambda model: replicated(DDP(model, backend), model)


def apart(backend: Backend) -> Callable[[nn.Module], TrainedModel]:
    return replicated


PARAMETERS = sum(p.numel() for p in task_of("ddp", WIDTH).make_model().parameters())


@pytest.mark.checkered
@pytest.mark.parametrize("kind", [Phalanx, Alone])
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("size", [2, 3])
def test_steps_are_what_one_process_gets_in_every_round(
    name: str, kind: type[Peer], size: int
) -> None:
    def rank(backend: Backend) -> int:
        context = RankContext(backend, "", 20.0, WIDTH)
        peer = Phalanx(backend.subgroup(range(size)), context) if kind is Phalanx else kind(context)
        call = peer.prepare(OPERATIONS[name], 0)
        assert time_rounds({"it": call}, context, rounds=2, seconds=1e-6) == {}
        assert call.calls >= 5
        return call.wrong

    assert phalanx.simulate(rank, size) == [0] * size


@pytest.mark.checkered
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", ["auto", *STEPS])
def test_every_way_to_step_is_what_one_process_gets_with_every_optimizer(
    way: str, optimizer: str
) -> None:
    def rank(backend: Backend) -> tuple[int, bool]:
        context = RankContext(backend, "", 20.0, WIDTH, optimizer)
        call = Phalanx(backend.subgroup(range(2)), context).prepare(
            OPERATIONS["ddp"], 0, algorithm=way
        )
        assert time_rounds({"it": call}, context, rounds=2, seconds=1e-6) == {}
        return call.wrong, call.optimizer is not None and call.optimizer > 0

    assert phalanx.simulate(rank, 2) == [(0, True)] * 2


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_another_optimizer_shows(optimizer: str) -> None:
    def by_sgd(model: nn.Module) -> TrainedModel:
        sgd = OPTIMIZERS["sgd"](model.parameters())
        return replicated(model)._replace(optimizer=lambda factory: sgd)

    step = TrainingStep(task_of("ddp", WIDTH, optimizer), by_sgd, rank=0, ranks=range(1))
    step.load()
    step.call()
    assert step.count_wrong(1) > PARAMETERS / 4


def test_the_right_number_of_steps_is_right() -> None:
    assert wrong_on_ranks(together, calls=3) == [0, 0]


@pytest.mark.parametrize("calls", [0, 1, 2, 4])
def test_a_step_too_few_or_too_many_shows(calls: int) -> None:
    assert min(wrong_on_ranks(together, calls=calls)) > PARAMETERS / 4


def test_gradients_that_are_not_averaged_show() -> None:
    assert min(wrong_on_ranks(apart, calls=3)) > PARAMETERS / 4


def test_a_piece_that_missed_the_last_step_shows() -> None:
    """Two of the rows of one weight are those of the step before."""
    model = task_of("ddp", WIDTH).make_model()
    weight = next(model.parameters()).data
    step = TrainingStep(
        task_of("ddp", WIDTH),
        lambda _: replicated(model),
        rank=0,
        ranks=range(1),
    )
    step.load()
    step.call()
    step.call()
    before = weight[3:5].clone()
    step.call()
    assert step.count_wrong(3) == 0
    weight[3:5] = before
    assert 0 < step.count_wrong(3) <= 2 * WIDTH


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_shows(value: float) -> None:
    def spoil(model: nn.Module, backend: Backend) -> None:
        next(model.parameters())[0, 0] = value

    assert min(wrong_on_ranks(together, calls=3, then=spoil)) > 0


def test_a_rank_by_itself_is_right_for_its_own_samples_only() -> None:
    task = task_of("ddp", WIDTH)
    own = TrainingStep(task, replicated, rank=1, ranks=range(1, 2))
    other = TrainingStep(task, replicated, rank=0, ranks=range(1, 2))
    for step in (own, other):
        step.load()
        step.call()
    assert own.count_wrong(1) == 0
    assert other.count_wrong(1) > PARAMETERS / 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stretch_begins_with_the_same_weights_and_a_new_optimizer(optimizer: str) -> None:
    step = TrainingStep(task_of("ddp", WIDTH, optimizer), replicated, rank=0, ranks=range(1))
    for _ in range(3):
        step.load()
        step.call()
        assert step.count_wrong(1) == 0


def test_tasks_are_those_of_the_readme_unless_another_width_is_requested() -> None:
    assert {"ddp": TrainingTask(1024, 6, 32), "fsdp": TrainingTask(2048, 4, 16)} == TASKS
    assert task_of("fsdp", 0) == TASKS["fsdp"]
    assert task_of("fsdp", 8) == TrainingTask(8, 4, 16)
    assert task_of("ddp", 8, "adamw") == TrainingTask(8, 6, 32, "adamw")
    assert str(TASKS["fsdp"]) == "4 layers of 2048 x 2048, 16 samples on each rank"
    assert str(task_of("fsdp", 8, "adamw")).endswith("16 samples on each rank, adamw")
