"""Micro-batches: `no_sync` keeps gradients, the next pass, or `sync_gradients`, averages them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from ddp_models import Branches, DefinedBackwards, mlp, noise, seeded
from ddp_runs import Watched, assert_close, assert_same_bits, gradients, outcome_of
from fsdp_runs import gradient_pieces, joined
from torch import nn
from wrappings import (
    FSDPS,
    FULL_SHARD_BY_MESSAGES,
    UNUSED,
    Wrapping,
    assert_gradients,
    average_kept,
    every_ddp,
    every_fsdp,
    every_wrapping,
    keeping,
)

from phalanx import Backend, MisuseError

# What each pass is: kept on this rank, or averaged; "." is sync_gradients()
PLANS = ["kka", "kkka", "aaa", "kk.", "akk.", "kaka", "k.k.", "k.a", "ka.k.", "akaa", "a.k.."]


def backward(model: Any, rank: int, number: int = 0) -> None:
    model(noise(4, 6, seed=10 * number + rank)).pow(2).sum().backward()


def branches() -> nn.Module:
    return seeded(Branches)


def perform(model: Any, rank: int, plan: str, first: int = 0) -> None:
    for number, kind in enumerate(plan, first):
        if kind == ".":
            average_kept(model)
        else:
            with keeping(model) if kind == "k" else nullcontext():
                backward(model, rank, number)


def assert_sums(plan: str, build: Callable[[], nn.Module], wrap: Wrapping) -> None:
    """In three steps; between them gradients are dropped, set to zero, and dropped."""
    steps = [partial(perform, plan=plan, first=10 * step) for step in range(3)]
    for found, step in zip(wrap.gradients(3, build, *steps, alternate=True), steps, strict=True):
        assert_gradients(found, 3, build, step, rtol=1e-5, atol=1e-5)


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize("plan", PLANS)
def test_accumulated_gradients_are_the_sum_over_the_passes(plan: str, wrap: Wrapping):
    assert_sums(plan, mlp, wrap)


@pytest.mark.checkered
@every_ddp
@pytest.mark.parametrize("plan", ["kkka", "kk."])
def test_they_are_so_where_layers_are_used_in_another_order(plan: str, wrap: Wrapping):
    assert_sums(plan, lambda: seeded(DefinedBackwards), wrap)


@every_wrapping
def test_an_optimizer_may_step_between_passes_that_are_kept(wrap: Wrapping):
    """What was kept is of the parameters before the step, as it would be on a plain model."""

    def train(model: nn.Module, ranks: list[int]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            losses = [model(noise(4, 6, seed=5 * number + r)).pow(2).mean() for r in ranks]
            torch.stack(losses).mean().backward()
            optimizer.step()
            with keeping(model):
                losses = [model(noise(4, 6, seed=50 * number + r)).pow(2).mean() for r in ranks]
                torch.stack(losses).mean().backward()

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)
        train(wrapped, [backend.rank])
        wrapped.sync_gradients()
        return wrap.state(wrapped), gradient_pieces(wrapped)

    plain = mlp()
    train(plain, [0, 1])
    found = wrap.on_ranks(2, mlp, body)
    for state, _ in found:
        assert_close(state, plain.state_dict())
    assert_close(joined([pieces for _, pieces in found]), gradients(plain))


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize("kept", [False, True])
def test_zero_grad_drops_what_was_averaged_and_what_was_kept(kept: bool, wrap: Wrapping):
    def one(model: Any, rank: int) -> None:
        for number, to_none in enumerate((False, True, False), 50):
            with keeping(model) if kept else nullcontext():
                backward(model, rank, number)
            model.zero_grad(set_to_none=to_none)
        backward(model, rank)

    (found,) = wrap.gradients(2, mlp, one)
    assert_gradients(found, 2, mlp, backward)


@every_wrapping(among=[wrap for wrap in FSDPS if wrap is not FULL_SHARD_BY_MESSAGES])
def test_what_only_one_rank_has_kept_counts_as_zeros_on_the_others(wrap: Wrapping):
    def one(model: Any, rank: int) -> None:
        with keeping(model):
            output = model(noise(4, 6, seed=rank), "left", "right")
            if rank == 0:
                output.pow(2).sum().backward()
        average_kept(model)

    (found,) = wrap.gradients(2, branches, one)
    assert_gradients(found, 2, branches, one)


@every_wrapping
def test_sync_gradients_after_it_or_an_ordinary_pass_does_nothing(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> None:
        wrapped = wrap(model, backend)
        backward(wrapped, backend.rank)
        before = gradients(wrapped)
        watched = Watched(backend)
        wrapped.sync_gradients()
        wrapped.sync_gradients()
        assert watched.events == []
        assert watched.bytes_sent == 0
        assert_same_bits([before, gradients(wrapped)])

    wrap.on_ranks(2, mlp, body)


@every_ddp
def test_ddp_has_nothing_to_average_before_any_pass_or_twice(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> None:
        ddp = wrap(model, backend)
        ddp.sync_gradients()
        backward(ddp, backend.rank)
        final = gradients(ddp)
        watched = Watched(backend)
        with ddp.no_sync():
            backward(ddp, backend.rank)
        ddp.sync_gradients()
        once, sent = gradients(ddp), watched.bytes_sent
        ddp.sync_gradients()
        assert watched.bytes_sent == sent
        assert_same_bits([once, gradients(ddp)])
        assert_close(once, {name: 2 * grad for name, grad in final.items()})

    wrap.on_ranks(3, mlp, body)


@every_fsdp
def test_fsdp_refuses_sync_gradients_before_any_forward_pass(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = wrap(model, backend)
        error = outcome_of(fsdp.sync_gradients)
        assert isinstance(error, MisuseError)
        assert f"rank {backend.rank}" in str(error)
        assert "before any forward pass" in str(error)
        with torch.no_grad():
            fsdp(noise(4, 6))
        fsdp.sync_gradients()
        assert all(p.grad is None for p in fsdp.parameters())

    wrap.on_ranks(2, mlp, body)


@every_ddp
def test_under_no_sync_ddp_sends_nothing_and_gradients_are_the_rank_s_own(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> Any:
        ddp = wrap(model, backend)
        watched = Watched(backend)
        with ddp.no_sync():
            backward(ddp, backend.rank)
            backward(ddp, backend.rank, 1)
        assert watched.events == []
        assert watched.bytes_sent == 0
        return gradients(ddp)

    for rank, found in enumerate(wrap.on_ranks(3, mlp, body)):
        alone = mlp()
        backward(alone, rank)
        backward(alone, rank, 1)
        assert_close(found, gradients(alone))


@every_fsdp
def test_under_no_sync_fsdp_gives_no_gradient_and_moves_none(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = wrap(model, backend)
        watched = Watched(backend)
        with fsdp.no_sync():
            backward(fsdp, backend.rank)
        assert not [event for event in watched.events if "reduce" in event]
        assert all(p.grad is None for p in fsdp.parameters())

    wrap.on_ranks(2, mlp, body)


@every_wrapping
def test_no_sync_ends_with_its_block_though_that_fails_and_may_be_nested(wrap: Wrapping):
    def nested(model: Any, rank: int) -> None:
        with pytest.raises(KeyError), keeping(model), keeping(model):
            raise KeyError
        with keeping(model):
            with keeping(model):
                backward(model, rank, 0)
            with pytest.raises(ArithmeticError), keeping(model):
                raise ArithmeticError
            backward(model, rank, 1)
        backward(model, rank, 2)

    (found,) = wrap.gradients(2, mlp, nested)
    assert_gradients(found, 2, mlp, nested)


@every_fsdp
def test_what_fsdp_keeps_is_no_gradient_yet_after_an_inner_block_has_failed(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = wrap(model, backend)
        with fsdp.no_sync():
            with pytest.raises(ArithmeticError), fsdp.no_sync():
                raise ArithmeticError
            backward(fsdp, backend.rank)
            assert all(p.grad is None for p in fsdp.parameters())

    wrap.on_ranks(2, mlp, body)


@every_ddp
def test_ranks_may_keep_different_numbers_of_micro_batches(wrap: Wrapping):
    def uneven(model: Any, rank: int) -> None:
        with keeping(model):
            for number in range(rank):
                backward(model, rank, number)
        backward(model, rank, 5)

    (found,) = wrap.gradients(3, mlp, uneven)
    assert_gradients(found, 3, mlp, uneven)


# Micro-batches that reach different parameters -------------------------------------------------


def of_branches(model: Any, rank: int, number: int, *names: str) -> None:
    model(noise(2, 6, seed=10 * rank + number), *names).sum().backward()


def alternate(model: Any, rank: int, turn: int) -> None:
    """Each micro-batch reaches the trunk and one of the branches."""
    with keeping(model):
        of_branches(model, rank, 2 * turn, "left")
    of_branches(model, rank, 2 * turn + 1, "right")


def other_way_on_others(model: Any, rank: int, turn: int) -> None:
    """The first micro-batch reaches another branch on each rank, the last one both."""
    first, second = ("left", "right") if rank else ("right", "left")
    with keeping(model):
        of_branches(model, rank, turn, first)
    of_branches(model, rank, turn + 10, second, first)


def less_at_last(model: Any, rank: int, turn: int) -> None:
    """What was kept counts, though the last pass of rank 1 reaches one branch only."""
    with keeping(model):
        of_branches(model, rank, turn, "left", "right")
    of_branches(model, rank, turn, *(["left"] if rank else ["left", "right"]))


@pytest.mark.checkered
@every_ddp
@pytest.mark.parametrize("one", [alternate, other_way_on_others, less_at_last])
def test_micro_batches_may_reach_different_branches(one: Callable[..., None], wrap: Wrapping):
    turns = [partial(one, turn=turn) for turn in range(3)]
    for ranks in (2, 3):
        for found, turn in zip(wrap.gradients(ranks, branches, *turns), turns, strict=True):
            assert_gradients(found, ranks, branches, turn)


@every_ddp
def test_sync_gradients_names_parameters_that_no_micro_batch_reached(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        ddp = wrap(model, backend)
        with ddp.no_sync():
            ddp(torch.ones(2, 6), "left").sum().backward()
        backend.barrier()
        return outcome_of(ddp.sync_gradients)

    for error in wrap.on_ranks(2, branches, body):
        assert isinstance(error, MisuseError)
        assert "right.weight" in str(error)
        assert "right.bias" in str(error)


class Sometimes(nn.Module):
    """A layer that one rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.used else x + 0


@every_wrapping
def test_after_sync_gradients_what_a_rank_has_not_used_counts_as_zeros_still(wrap: Wrapping):
    def both() -> nn.Module:
        return seeded(lambda: nn.Sequential(Sometimes(), Sometimes()))

    def kept(model: Any, rank: int) -> None:
        with keeping(model):
            backward(model, rank, 1)
        average_kept(model)

    def last(model: Any, rank: int) -> None:
        model.get_submodule("module.0").used = rank == 0
        model(noise(4, 6, seed=rank).requires_grad_()).pow(2).sum().backward()

    _, found = wrap.gradients(2, both, kept, last, ddp=UNUSED)
    assert_gradients(found, 2, both, last)
