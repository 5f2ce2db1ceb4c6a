"""Loss scaling over shards: a step is taken on all ranks, or on none."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ddp_models import loss_of, mlp, vectors
from ddp_runs import outcome_of, rows_of
from torch import Tensor

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DesyncError,
    GradScaler,
    ShardedOptimizer,
    ShardingStrategy,
    clip_grad_norm_,
    simulate,
)

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
OPTIONS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}


def plain_run() -> dict[str, Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    for number in range(4):
        inputs, targets = vectors(12, seed=number)
        optimizer.zero_grad()
        scaler.scale(loss_of(model(inputs), targets)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return model.state_dict() | {"scale": torch.tensor(scaler.get_scale())}


@pytest.mark.checkered
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("spoilt", [-1, 2], ids=["all finite", "one infinity in the third step"])
def test_training_with_a_scaler_equals_plain_training(
    strategy: ShardingStrategy, spoilt: int
) -> None:
    expected = plain_run()
    models = [mlp() for _ in range(3)]

    def run(backend: Backend) -> dict[str, Tensor]:
        model = FSDP(models[backend.rank], backend, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = GradScaler(backend, **OPTIONS)
        skipped = 0
        for number in range(4 if spoilt < 0 else 3):
            inputs, targets = vectors(12, seed=number)
            optimizer.zero_grad()
            loss = loss_of(model(rows_of(inputs, backend)), rows_of(targets, backend))
            scaler.scale(loss).backward()
            if number == spoilt and backend.rank == 1:
                shard = max(model.parameters(), key=Tensor.numel)
                shard.grad[0] = float("inf")
            before = [p.detach().clone() for p in model.parameters()]
            scaler.unscale_(optimizer)
            clip_grad_norm_(model, 0.5)
            scaler.step(optimizer)
            scaler.update()
            now = list(model.parameters())
            skipped += all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        assert skipped == (spoilt >= 0)
        return model.full_state_dict() | {"scale": torch.tensor(scaler.get_scale())}

    for state in simulate(run, 3):
        if spoilt < 0:
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
        else:
            assert state["scale"] == 8  # doubled after two steps, halved by the third


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: ShardedOptimizer(torch.optim.SGD, model, lr=0.1),
    ],
    ids=["a plain optimizer", "ShardedOptimizer"],
)
def test_a_scaler_that_is_not_enabled_changes_nothing(make: Any) -> None:
    """As in scripts that turn mixed precision on and off by one option."""

    def run(enabled: bool, backend: Backend) -> tuple[float, list[Tensor]]:
        model = DDP(mlp(), backend)
        optimizer = make(model)
        scaler = GradScaler(backend, enabled=False)
        inputs, targets = vectors(12, seed=backend.rank)
        loss = loss_of(model(inputs), targets)
        (scaler.scale(loss) if enabled else loss).backward()
        if enabled:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model, 0.5)
        if enabled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        return scaler.get_scale(), [p.detach() for p in model.parameters()]

    for with_it, without in zip(
        simulate(partial(run, True), 2), simulate(partial(run, False), 2), strict=True
    ):
        assert with_it[0] == without[0] == 1.0
        for one, other in zip(with_it[1], without[1], strict=True):
            assert torch.equal(one, other)


def test_an_optimizer_without_parameters_skips_with_that_of_the_other_ranks() -> None:
    """As that of a head, on other stages of a pipeline."""

    def run(backend: Backend) -> tuple[list[bool], float]:
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(1 + backend.rank)]
        given = [{"params": parameters[:1]}], [{"params": parameters[1:]}]
        optimizers = [torch.optim.SGD(groups, lr=0.1) for groups in given]
        scaler = GradScaler(backend, init_scale=8.0)
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full((2,), float("inf") if number else 8.0)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        return [bool((p == 1).all()) for p in parameters], scaler.get_scale()

    assert list(simulate(run, 2)) == [([False], 4.0), ([False, True], 4.0)]


def test_ranks_with_different_numbers_of_optimizers_are_told_so() -> None:
    def run(backend: Backend) -> BaseException | None:
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(1 + backend.rank)]
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
        scaler = GradScaler(backend)
        for optimizer in optimizers:
            outcome = outcome_of(lambda optimizer=optimizer: scaler.unscale_(optimizer))
        return outcome or outcome_of(backend.barrier)

    for outcome in simulate(run, 2):
        assert isinstance(outcome, DesyncError)
        assert "GradScaler, an optimizer" in str(outcome)
