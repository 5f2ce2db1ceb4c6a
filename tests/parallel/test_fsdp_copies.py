"""Copies of a sharded model: deepcopy, and so moving averages of its parameters (EMA, SWA)."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import torch
from ddp_models import noise, seeded
from ddp_runs import assert_close, outcome_of
from fsdp_runs import (
    COMMON,
    MESSAGES,
    WITH_HYBRID,
    alone,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx import FSDP, Backend, DesyncError, ErrorFeedback, TopK

RANKS = 2


class Tied(nn.Module):
    """A batch norm, whose statistics are each rank's own, and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def build() -> nn.Module:
    return seeded(Tied)


def x_of(rank: int) -> Tensor:
    return noise(4, 6, seed=rank)


def train_with_average(model: nn.Module, numbers: list[int]) -> tuple[AveragedModel, Tensor]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for number in numbers:
        model(noise(4, 6, seed=number)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    average.eval()
    return average, average(noise(4, 6, seed=99)).detach()


@every_way(WITH_HYBRID)
def test_a_moving_average_is_that_of_one_process(strategy: Any, where: Any) -> None:
    def run(model: nn.Module, backend: Backend) -> tuple[dict[str, Tensor], Tensor]:
        average, output = train_with_average(FSDP(model, backend, strategy=strategy), [0, 1, 2])
        inner = average.module
        assert isinstance(inner, FSDP)
        return inner.full_state_dict(), output

    plain, expected = train_with_average(build(), [0, 1, 2])
    for state, output in on_ranks(where, RANKS, build, run):
        assert_close(state, dict(plain.module.state_dict()))
        torch.testing.assert_close(output, expected)


@every_way(WITH_HYBRID)
def test_copy_and_original_train_apart(strategy: Any, where: Any) -> None:
    def run(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, unit=nn.Linear)
        fsdp(x_of(backend.rank)).sum().backward()
        fsdp.module.norm.running_mean.fill_(backend.rank)
        other = copy.deepcopy(fsdp)
        assert other.module.norm.running_mean.eq(backend.rank).all()
        assert other.slices() == fsdp.slices()
        assert other.module.last.weight is other.module.first.weight
        before = gradient_pieces(fsdp)
        with torch.no_grad():
            assert torch.equal(other.eval()(x_of(9)), fsdp.eval()(x_of(9)))
        other.train()(x_of(backend.rank)).pow(2).mean().backward()
        after = gradient_pieces(fsdp)
        assert all(torch.equal(before[n][1], after[n][1]) for n in before)
        return gradient_pieces(other)

    found = joined(on_ranks(where, RANKS, build, run))
    losses = [lambda m, r=r: m(x_of(r)).pow(2).mean() for r in range(RANKS)]
    assert_close(found, alone(build, losses))


def test_a_copy_keeps_what_the_compressor_has_left_over() -> None:
    def run(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, compression=ErrorFeedback(TopK(0.1)))
        fsdp(x_of(backend.rank)).pow(2).mean().backward()
        other = copy.deepcopy(fsdp)
        for one in (fsdp, other):
            one.zero_grad()
            one.eval()
            one(x_of(backend.rank)).pow(2).mean().backward()
        pairs = zip(fsdp.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)

    on_ranks(MESSAGES, RANKS, build, run)


def test_the_original_lives_no_longer_for_its_copy() -> None:
    def run(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        other = copy.deepcopy(fsdp)
        gone = weakref.ref(fsdp)
        del fsdp, model
        gc.collect()
        assert gone() is None
        other(x_of(0)).sum().backward()

    on_ranks(COMMON, 1, build, run)


def test_a_copy_that_only_one_rank_makes_is_named() -> None:
    def run(model: nn.Module, backend: Backend) -> str:
        fsdp = FSDP(model, backend)
        act = (lambda: copy.deepcopy(fsdp)) if backend.rank == 0 else (lambda: fsdp(x_of(0)))
        error = outcome_of(act)
        assert isinstance(error, DesyncError)
        return str(error)

    for message in on_ranks(MESSAGES, RANKS, build, run):
        assert "after copy.deepcopy of an FSDP" in message
