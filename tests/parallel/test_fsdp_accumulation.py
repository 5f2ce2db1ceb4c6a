"""Gradients of several passes: under `no_sync`, without it, and both in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import Branches, mlp, noise, seeded
from ddp_runs import Watched, assert_close, gradients, mean_of, outcome_of
from fsdp_runs import (
    COMMON,
    WITH_HYBRID,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import nn

from phalanx import FSDP, Backend, MisuseError

RANKS = 2
way = every_way(WITH_HYBRID)

# What each pass is: kept on this rank, or averaged; "." is sync_gradients()
PLANS = ["kka", "aaa", "kk.", "akk.", "kaka", "k.k.", "ka.k.", "akaa"]


def backward(model: nn.Module, rank: int, number: int) -> None:
    model(noise(4, 6, seed=10 * number + rank)).pow(2).sum().backward()


def perform(fsdp: FSDP, rank: int, plan: str) -> None:
    for number, kind in enumerate(plan):
        if kind == "k":
            with fsdp.no_sync():
                backward(fsdp, rank, number)
        elif kind == "a":
            backward(fsdp, rank, number)
        else:
            fsdp.sync_gradients()


@pytest.mark.checkered
@pytest.mark.parametrize(
    ("strategy", "where"), WITH_HYBRID[:3], ids=["common", "messages", "grad_op"]
)
@pytest.mark.parametrize("plan", PLANS)
def test_accumulated_gradients_are_the_sum_over_the_passes(plan: str, strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        for _ in range(2):
            fsdp.zero_grad()
            perform(fsdp, backend.rank, plan)
        return gradient_pieces(fsdp)

    plain = [mlp() for _ in range(RANKS)]
    for rank, model in enumerate(plain):
        for number, kind in enumerate(plan):
            if kind != ".":
                backward(model, rank, number)
    found = joined(on_ranks(where, RANKS, mlp, body))
    assert_close(found, mean_of([gradients(model) for model in plain]))


@way
def test_under_no_sync_no_gradient_is_given_and_none_is_moved(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        watched = Watched(backend)
        with fsdp.no_sync():
            backward(fsdp, backend.rank, 0)
        assert not [event for event in watched.events if "reduce" in event]
        assert all(p.grad is None for p in fsdp.parameters())

    on_ranks(where, RANKS, mlp, body)


@way
def test_an_optimizer_may_step_between_passes_that_are_kept(strategy: Any, where: Any):
    """What was kept is of the parameters before the step, as it would be on a plain model."""

    def train(model: nn.Module, ranks: list[int], keeping: Any, averaged: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            with averaged():
                losses = [model(noise(4, 6, seed=5 * number + r)).pow(2).mean() for r in ranks]
                torch.stack(losses).mean().backward()
            optimizer.step()
            with keeping():
                losses = [model(noise(4, 6, seed=50 * number + r)).pow(2).mean() for r in ranks]
                torch.stack(losses).mean().backward()

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        train(fsdp, [backend.rank], fsdp.no_sync, torch.enable_grad)
        fsdp.sync_gradients()
        return fsdp.full_state_dict(), gradient_pieces(fsdp)

    plain = mlp()
    train(plain, [0, 1], torch.enable_grad, torch.enable_grad)
    found = on_ranks(where, RANKS, mlp, body)
    for state, _ in found:
        assert_close(state, plain.state_dict())
    assert_close(joined([pieces for _, pieces in found]), gradients(plain))


@way
def test_zero_grad_drops_what_was_averaged_and_either_form_of_it_will_do(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        for number, to_none in enumerate((False, True, False)):
            backward(fsdp, backend.rank, 50 + number)
            fsdp.zero_grad(set_to_none=to_none)
        backward(fsdp, backend.rank, 0)
        return gradient_pieces(fsdp)

    plain = [mlp() for _ in range(RANKS)]
    for rank, model in enumerate(plain):
        backward(model, rank, 0)
    found = joined(on_ranks(where, RANKS, mlp, body))
    assert_close(found, mean_of([gradients(model) for model in plain]))


@way
def test_zero_grad_drops_what_was_kept_too(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        with fsdp.no_sync():
            backward(fsdp, backend.rank, 7)
        fsdp.zero_grad()
        backward(fsdp, backend.rank, 0)
        return gradient_pieces(fsdp)

    plain = [mlp() for _ in range(RANKS)]
    for rank, model in enumerate(plain):
        backward(model, rank, 0)
    found = joined(on_ranks(where, RANKS, mlp, body))
    assert_close(found, mean_of([gradients(model) for model in plain]))


@pytest.mark.parametrize(("strategy", "where"), [WITH_HYBRID[0], *WITH_HYBRID[2:]])
def test_what_only_one_rank_has_kept_counts_as_zeros_on_the_others(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        with fsdp.no_sync():
            output = fsdp(noise(4, 6, seed=backend.rank), "left", "right")
            if backend.rank == 0:
                output.pow(2).sum().backward()
        fsdp.sync_gradients()
        return gradient_pieces(fsdp)

    plain = [seeded(Branches) for _ in range(RANKS)]
    plain[0](noise(4, 6), "left", "right").pow(2).sum().backward()
    found = joined(on_ranks(where, RANKS, lambda: seeded(Branches), body))
    assert_close(found, mean_of([gradients(model) for model in plain]))


@way
def test_sync_gradients_is_for_after_a_forward_pass_and_may_be_called_twice(
    strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        error = outcome_of(fsdp.sync_gradients)
        assert isinstance(error, MisuseError)
        assert f"rank {backend.rank}" in str(error)
        assert "before any forward pass" in str(error)
        with torch.no_grad():
            fsdp(noise(4, 6))
        fsdp.sync_gradients()
        assert all(p.grad is None for p in fsdp.parameters())
        backward(fsdp, backend.rank, 0)
        before = gradients(fsdp)
        watched = Watched(backend)
        fsdp.sync_gradients()
        fsdp.sync_gradients()
        assert watched.events == []
        assert_close(gradients(fsdp), before)

    on_ranks(where, RANKS, mlp, body)


def test_no_sync_ends_with_its_block_though_that_fails_and_may_be_nested():
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        with fsdp.no_sync():
            with pytest.raises(ArithmeticError), fsdp.no_sync():
                raise ArithmeticError
            backward(fsdp, backend.rank, 0)
            assert all(p.grad is None for p in fsdp.parameters())
        backward(fsdp, backend.rank, 1)
        return gradient_pieces(fsdp)

    plain = [mlp() for _ in range(RANKS)]
    for rank, model in enumerate(plain):
        backward(model, rank, 0)
        backward(model, rank, 1)
    assert_close(joined(on_ranks(COMMON, RANKS, mlp, body)), mean_of([gradients(m) for m in plain]))


class Sometimes(nn.Module):
    """A layer that one rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.used else x + 0


@way
def test_after_sync_gradients_what_a_rank_has_not_used_counts_as_zeros_still(
    strategy: Any, where: Any
):
    build = lambda: seeded(lambda: nn.Sequential(Sometimes(), Sometimes()))  # noqa: E731

    def last(fsdp: nn.Module, model: Any, rank: int) -> None:
        model[0].used = rank == 0
        fsdp(noise(4, 6, seed=rank).requires_grad_()).pow(2).sum().backward()

    def body(model: Any, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        with fsdp.no_sync():
            backward(fsdp, backend.rank, 1)
        fsdp.sync_gradients()
        fsdp.zero_grad()
        last(fsdp, model, backend.rank)
        return gradient_pieces(fsdp)

    plain = [build() for _ in range(RANKS)]
    for rank, model in enumerate(plain):
        last(model, model, rank)
    found = joined(on_ranks(where, RANKS, build, body))
    assert_close(found, mean_of([gradients(model) for model in plain]))
