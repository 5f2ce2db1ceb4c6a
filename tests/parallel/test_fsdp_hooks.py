"""Hooks on an FSDP's parameters: they see this rank's part of the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Fails, mlp, noise, seeded
from ddp_runs import assert_close
from fsdp_runs import (
    COMMON,
    WITH_HYBRID,
    alone,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
    value_pieces,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend

RANKS = 2
STEPS = 3


def loss_of(model: nn.Module, rank: int, number: int = 0) -> Tensor:
    return model(noise(4, 6, seed=10 * number + rank)).pow(2).mean()


@pytest.mark.checkered
@every_way(WITH_HYBRID)
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_a_gradient_hook_changes_the_mean(strategy: Any, where: Any, when: str) -> None:
    def run(model: nn.Module, backend: Backend) -> Any:
        if when == "before wrapping":
            for p in model.parameters():
                p.register_hook(lambda grad: grad * 3)
        fsdp = FSDP(model, backend, strategy=strategy)
        if when == "after wrapping":
            for p in fsdp.parameters():
                p.register_hook(lambda grad: grad * 3)
        loss_of(fsdp, backend.rank).backward()
        loss_of(fsdp, backend.rank).backward()  # only what is new is changed
        return gradient_pieces(fsdp)

    found = joined(on_ranks(where, RANKS, mlp, run))
    expected = alone(mlp, [lambda m, r=r: 6 * loss_of(m, r) for r in range(RANKS)])
    assert_close(found, expected)


def test_hooks_wait_for_the_pass_that_reduces() -> None:
    def run(model: nn.Module, backend: Backend) -> list[str]:
        calls: list[str] = []
        fsdp = FSDP(model, backend)
        for p in fsdp.parameters():
            p.register_hook(lambda grad: calls.append("gradient"))
            p.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
        with fsdp.no_sync():
            loss_of(fsdp, backend.rank).backward()
        assert not calls
        fsdp.sync_gradients()
        first = list(calls)
        x = noise(4, 6).requires_grad_()
        torch.autograd.grad(fsdp(x).sum(), x)  # no parameter's gradient
        assert calls == first
        return first

    for calls in on_ranks(COMMON, RANKS, mlp, run):
        assert calls == ["gradient"] * 6 + ["accumulated"] * 6


def each_its_own(fsdp: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """The step of each parameter in the backward pass, as memory-saving recipes do it."""
    optimizers = {p: make([p]) for p in fsdp.parameters()}

    def step(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in fsdp.parameters():
        p.register_post_accumulate_grad_hook(step)


@every_way(WITH_HYBRID)
def test_optimizers_in_hooks_train_like_one_process(strategy: Any, where: Any) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.05)

    def run(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        each_its_own(fsdp, make)
        for number in range(STEPS):
            loss_of(fsdp, backend.rank, number).backward()
            assert all(p.grad is None for p in fsdp.parameters())
        return value_pieces(fsdp)

    plain = seeded(mlp)
    each_its_own(plain, make)
    for number in range(STEPS):
        sum(loss_of(plain, rank, number) / RANKS for rank in range(RANKS)).backward()  # type: ignore[union-attr]
    found = joined(on_ranks(where, RANKS, lambda: seeded(mlp), run))
    assert_close(found, {name: p.detach() for name, p in plain.named_parameters()})


@every_way(WITH_HYBRID)
def test_after_an_error_in_backward_no_optimizer_in_a_hook_has_stepped(
    strategy: Any, where: Any
) -> None:
    """So the pass may be tried again, where in one process some parameters would have moved."""

    def run(model: nn.Module, backend: Backend) -> None:
        model.get_submodule("2").register_forward_pre_hook(
            lambda _, given: (Fails.apply(given[0]),) if fails else given
        )
        fsdp = FSDP(model, backend, strategy=strategy)
        each_its_own(fsdp, torch.optim.SGD)
        before = {name: p.detach().clone() for name, p in fsdp.named_parameters()}
        fails = True
        with pytest.raises(ArithmeticError):
            loss_of(fsdp, backend.rank).backward()
        fails = False
        assert all(torch.equal(p, before[name]) for name, p in fsdp.named_parameters())
        loss_of(fsdp, backend.rank).backward()
        assert not any(torch.equal(p, before[n]) for n, p in fsdp.named_parameters() if p.numel())

    on_ranks(where, RANKS, lambda: seeded(mlp), run)
