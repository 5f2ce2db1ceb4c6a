"""What a plan has forgotten does not show in shapes; check_whole_parameters finds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import Watched, outcome_of
from tensor_models import NormedHeads, batch, plan_for, transformer
from torch import nn

from phalanx import FSDP, Backend, DesyncError, DeviceMesh, parallelize, simulate
from phalanx.tensor import ColumnStyle, RowStyle, check_whole_parameters

HEADS_PLAN: dict[str, Any] = {**dict.fromkeys("qkv", ColumnStyle(unit=4)), "mix": RowStyle(unit=4)}


def step(model: nn.Module, *inputs: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*inputs).pow(2).sum().backward()
    optimizer.step()


def test_a_norm_of_this_ranks_heads_that_the_plan_leaves_out_is_named():
    def run(backend: Backend) -> BaseException | None:
        model = parallelize(seeded(NormedHeads), backend, HEADS_PLAN)
        check_whole_parameters(model)
        step(model, noise(2, 5, 16))
        return outcome_of(lambda: check_whole_parameters(model))

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "rank 1 has q_norm.weight (float32 [4]) with values of hash" in str(error)
        assert 'has to be a "sequence_norm"' in str(error)


@pytest.mark.parametrize("forgotten", ["*norm*", None])
def test_a_norm_along_the_sequence_that_the_plan_leaves_out_is_named(forgotten: str | None):
    def run(backend: Backend) -> BaseException | None:
        plan = plan_for(sequence_dim=1)
        plan.pop(forgotten or "", None)
        model = parallelize(transformer(), backend, plan)
        step(model, batch()[0])
        return outcome_of(lambda: check_whole_parameters(model))

    for error in simulate(run, 3):
        assert (error is None) == (forgotten is None)
        assert error is None or "blocks.0.norm1.weight" in str(error)


def test_dropout_that_differs_between_the_ranks_is_found():
    def run(backend: Backend) -> BaseException | None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 6), nn.Linear(6, 4))
        model = parallelize(plain, backend, {"2": "column", "3": "row"})
        torch.manual_seed(backend.rank)
        step(model, noise(3, 4))
        return outcome_of(lambda: check_whole_parameters(model))

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "0.weight" in str(error)
        assert "dropout" in str(error)


def test_it_costs_8_bytes_and_works_on_shards():
    def run(backend: Backend) -> int:
        mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
        model = FSDP(parallelize(transformer(), mesh["tensor"], plan_for()), mesh["data"])
        step(model, batch()[0])
        watched = Watched(backend)
        check_whole_parameters(model)
        return watched.bytes_sent

    assert list(simulate(run, 4)) == [8] * 4


def test_without_parallel_layers_there_is_nothing_to_compare():
    check_whole_parameters(nn.Linear(2, 2))
