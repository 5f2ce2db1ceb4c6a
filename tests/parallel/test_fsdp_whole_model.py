"""The whole model for a while, with `summon_full_params`, or for good, with `unwrap`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import mlp, noise, seeded
from ddp_runs import assert_close, assert_same_bits, gradients, values
from fsdp_runs import (
    COMMON,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    WITH_HYBRID,
    alone,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import DDP, FSDP, Backend, MisuseError

RANKS = 2
way = every_way(WITH_HYBRID)
precision = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])


class Recurrent(nn.Module):
    """Has lists of its parameters besides."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0])


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(noise(4, 6, seed=rank)).pow(2).sum()


@pytest.mark.checkered
@way
@precision
def test_inside_modules_have_full_parameters_and_outside_they_have_shards(
    dtype: Any, strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy, mixed_precision=dtype)
        shards = [p.clone() for p in fsdp.parameters()]
        with fsdp.summon_full_params(writeback=False):
            for number in (0, 2, 4):
                torch.testing.assert_close(model[number].weight.detach(), mlp()[number].weight)
                assert model[number].weight.dtype is torch.float32
            assert model[0].weight.norm() == mlp()[0].weight.norm()
            assert model[0].weight.numpy(force=True).shape == (8, 6)
            assert_same_bits([dict(enumerate(shards)), dict(enumerate(fsdp.parameters()))])
        assert model[0].weight is next(fsdp.parameters())
        loss_of(fsdp, backend.rank).backward()

    on_ranks(where, RANKS, mlp, body)


@pytest.mark.checkered
@way
@precision
@pytest.mark.parametrize("writeback", [True, False])
def test_changes_are_written_back_if_that_was_asked_for(
    writeback: bool, dtype: Any, strategy: Any, where: Any
):
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight.mul_(2)
            model[2].bias.data = torch.arange(7.0)
            nn.init.constant_(model[4].weight, 0.5)

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, mixed_precision=dtype)
        loss_of(fsdp, backend.rank).backward()
        with fsdp.summon_full_params(writeback=writeback):
            change(model)
        with torch.no_grad():
            output = fsdp(noise(4, 6)).float()
        return fsdp.full_state_dict(), output

    plain = mlp()
    if writeback:
        with torch.no_grad():
            plain[0].weight.mul_(2)
            plain[4].weight.fill_(0.5)
    for state, output in on_ranks(where, RANKS, mlp, body):
        state.pop("2.bias"), state.pop("2.weight")
        wanted = {n: v for n, v in plain.state_dict().items() if n[0] != "2"}
        assert_close(state, wanted)
        if not writeback:
            torch.testing.assert_close(output, plain(noise(4, 6)).detach(), atol=0.05, rtol=0.05)


def fail(model: nn.Module) -> None:
    nn.init.zeros_(model[0].weight)
    raise ArithmeticError


def test_an_error_inside_leaves_everything_as_it_was():
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        with pytest.raises(ArithmeticError), fsdp.summon_full_params():
            fail(model)
        assert_same_bits([values(mlp()), fsdp.full_state_dict()])
        loss_of(fsdp, backend.rank).backward()
        return gradient_pieces(fsdp)

    losses = [lambda m, r=rank: loss_of(m, r) for rank in range(RANKS)]
    for where in (COMMON, MESSAGES):
        assert_close(joined(on_ranks(where, RANKS, mlp, body)), alone(mlp, losses))


def test_it_is_not_for_forward_passes_and_not_for_use_inside_itself():
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        with fsdp.summon_full_params():
            with pytest.raises(MisuseError, match=f"rank {backend.rank}: .*leave it first"):
                fsdp(noise(4, 6))
            with pytest.raises(MisuseError, match="inside itself"), fsdp.summon_full_params():
                pass
        fsdp(noise(4, 6))

    on_ranks(COMMON, RANKS, mlp, body)


@way
def test_between_forward_and_backward_it_changes_nothing_unless_something_is_written(
    strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        loss = loss_of(fsdp, backend.rank)
        with fsdp.summon_full_params(writeback=False):
            assert model[0].weight.shape == (8, 6)
        loss.backward()
        return gradient_pieces(fsdp)

    losses = [lambda m, r=rank: loss_of(m, r) for rank in range(RANKS)]
    assert_close(joined(on_ranks(where, RANKS, mlp, body)), alone(mlp, losses))


@pytest.mark.checkered
@way
@precision
def test_unwrap_gives_the_plain_module_which_trains_on(dtype: Any, strategy: Any, where: Any):
    def train(model: nn.Module, ranks: list[int]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(2):
            optimizer.zero_grad()
            torch.stack([loss_of(model, 10 * number + r) for r in ranks]).mean().backward()
            optimizer.step()

    build = lambda: seeded(Recurrent)  # noqa: E731

    def body(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
        fsdp = FSDP(model, backend, strategy=strategy, mixed_precision=dtype)
        train(fsdp, [backend.rank])
        before = fsdp.full_state_dict()
        plain = fsdp.unwrap()
        assert plain is model
        assert_same_bits([before, values(plain)])
        assert all(p.grad is None for p in plain.parameters())
        assert not any(module._forward_hooks for module in plain.modules())
        assert not any(module._forward_pre_hooks for module in plain.modules())
        with pytest.raises(MisuseError, match="after unwrap"):
            fsdp(noise(4, 6))
        if dtype is None:
            train(plain, [0, 1])
        return values(plain)

    plain = build()
    train(plain, [0, 1])
    train(plain, [0, 1])
    for state in on_ranks(where, RANKS, build, body):
        if dtype is None:
            assert_close(state, values(plain))


def test_what_was_unwrapped_may_be_wrapped_again_in_another_way():
    def body(model: nn.Module, backend: Backend) -> Any:
        for strategy in (FULL_SHARD, NO_SHARD, SHARD_GRAD_OP):
            fsdp = FSDP(model, backend, strategy=strategy)
            loss_of(fsdp, backend.rank).backward()
            fsdp.unwrap()
        ddp = DDP(model, backend)
        loss_of(ddp, backend.rank).backward()
        return gradients(ddp)

    losses = [lambda m, r=rank: loss_of(m, r) for rank in range(RANKS)]
    for where in (COMMON, MESSAGES):
        for found in on_ranks(where, RANKS, mlp, body):
            assert_close(found, alone(mlp, losses))
