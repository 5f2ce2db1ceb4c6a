"""`step`, `join` and `weighted` of a model with tensor parallel layers: ranks with parts of them do
the same, with the same weights, since each group of `mesh["data"]` sees its own weights only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import outcome_of
from torch import Tensor, nn

from phalanx import DDP, FSDP, Backend, DesyncError, DeviceMesh, parallelize, simulate
from phalanx.tensor import full_state_dict

ROWS = [(3, 1), (0, 2), (2, 4)]  # of each rank of the data axis
WRAPS: dict[str, Any] = {"DDP": DDP, "FSDP": FSDP}


def mlp() -> nn.Module:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    return seeded(build, 0).double()


def on_a_mesh(backend: Backend, wrap: Any) -> tuple[Any, DeviceMesh]:
    mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
    model = parallelize(mlp(), mesh["tensor"], {"0": "column", "2": "row"})
    return wrap(model, mesh["data"]), mesh


def inputs(data: int, step: int) -> Tensor:
    return noise(max(ROWS[step][data], 1), 4, seed=10 * step + data).double()[: ROWS[step][data]]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize("name", WRAPS)
def test_any_weights_give_the_numbers_of_one_process(name: str):
    plain, losses = mlp(), []
    optimizer = sgd(plain)
    for step, rows in enumerate(ROWS):
        x = torch.cat([inputs(data, step) for data in (0, 1)])
        optimizer.zero_grad()
        loss = plain(x).square().sum() / sum(rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def run(backend: Backend) -> dict[str, Tensor]:
        model, mesh = on_a_mesh(backend, WRAPS[name])
        chosen = sgd(model)
        for number, rows in enumerate(ROWS):
            mine = inputs(mesh["data"].rank, number)
            chosen.zero_grad()
            with model.step(rows[mesh["data"].rank], micro_batches=int(len(mine) > 0)) as step:
                if len(mine):
                    step.backward(model(mine).square().sum())
            chosen.step()
            assert step.loss == pytest.approx(losses[number], rel=1e-12)
        whole: dict[str, Tensor] = full_state_dict(model)
        return whole

    for found in simulate(run, 4):
        for key, value in plain.state_dict().items():
            assert (found[key] - value).norm() <= 1e-12 * value.norm(), key


def desync(name: str, body: Callable[[Any, bool], object]) -> list[BaseException | None]:
    """Each rank's error, where rank 1 of mesh["tensor"], in the first row, does something else."""

    def run(backend: Backend) -> BaseException | None:
        model, _ = on_a_mesh(backend, WRAPS[name])
        return outcome_of(lambda: body(model, backend.rank == 1))

    return list(simulate(run, 4))


def steps(model: Any, weight: float, micro_batches: int) -> None:
    with model.step(weight, micro_batches=micro_batches) as step:
        for _ in range(micro_batches):
            step.backward(model(torch.ones(1, 4, dtype=torch.float64)).sum())


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("other", [(5.0, 1), (4.0, 2), (0.0, 0), (-1.0, 1)])
def test_ranks_with_parts_of_the_same_layers_that_differ_are_told_with_both_places(
    name: str, other: tuple[float, int]
):
    """Another weight, another number of micro-batches, none, or an error of one of them."""
    errors = desync(name, lambda model, odd: steps(model, *(other if odd else (4.0, 1))))
    assert isinstance(errors[0], DesyncError)
    assert isinstance(errors[1], DesyncError if other[0] >= 0 else ValueError)
    assert "rank 1 has STEP next, of weight" in str(errors[0])
    assert "rank 0 has STEP next, of weight 4.0, in 1 micro-batches" in str(errors[0])
    assert all(isinstance(error, DesyncError) for error in errors[2:]), "they wait for no one"


def test_a_weighted_loss_of_another_number_of_samples_is_told():
    def body(model: Any, odd: bool) -> None:
        loss = model(torch.ones(1, 4, dtype=torch.float64)).mean()
        model.weighted(loss, 2 if odd else 1).backward()

    errors = desync("DDP", body)
    assert all(isinstance(error, DesyncError) for error in errors)
    assert "rank 1 has WEIGHTING next, of weight 2.0" in str(errors[0])


@pytest.mark.parametrize("name", WRAPS)
def test_a_replica_that_is_not_through_as_one_is_told_with_both_places(name: str):
    def body(model: Any, odd: bool) -> None:
        with model.join(lambda: None):
            for _ in range(1 if odd else 2):
                steps(model, 4.0, 1)

    errors = desync(name, body)
    assert all(isinstance(error, DesyncError) for error in errors)
    assert "rank 1 has OVER next" in str(errors[0])
    assert "rank 0 has STEP next, of weight 4.0" in str(errors[0])


@pytest.mark.parametrize("name", WRAPS)
def test_so_it_is_in_a_forward_pass_without_step(name: str):
    def body(model: Any, odd: bool) -> None:
        with model.join(lambda: None):
            for _ in range(1 if odd else 2):
                model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()

    assert all(isinstance(error, DesyncError) for error in desync(name, body)[:2])
