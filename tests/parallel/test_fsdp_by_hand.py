"""The explicit calls, for those who drive FSDP by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import mlp, noise
from ddp_runs import Watched, assert_same_bits, outcome_of
from fsdp_runs import COMMON, COOPERATIVE, FULL_SHARD, MESSAGES, NO_SHARD, SHARD_GRAD_OP, on_ranks
from torch import Tensor, nn

from phalanx import (
    FSDP,
    Backend,
    MisuseError,
    ShardingStrategy,
    SizeMismatchError,
    UnsupportedOperationError,
)

RANKS = 2
GATHERS = [FULL_SHARD, ShardingStrategy.hybrid(2)]
KEEPS = [SHARD_GRAD_OP, NO_SHARD]
somewhere = pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])


def step(fsdp: FSDP, seed: int = 0) -> None:
    fsdp(noise(4, 6, seed=seed)).pow(2).sum().backward()
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


@somewhere
@pytest.mark.parametrize("strategy", GATHERS, ids=str)
def test_prefetched_parameters_are_used_by_the_next_forward_pass(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        assert not fsdp.has_pending_prefetch()
        for number in range(2):
            fsdp.prefetch_forward_params()
            assert fsdp.has_pending_prefetch()
            error = outcome_of(fsdp.prefetch_forward_params)
            assert isinstance(error, MisuseError)
            assert f"rank {backend.rank}" in str(error)
            assert "twice in a row" in str(error)
            assert fsdp.has_pending_prefetch()
            step(fsdp, number)
            assert not fsdp.has_pending_prefetch()

    on_ranks(where, RANKS, mlp, body)


def test_a_prefetch_begins_to_unshard_and_does_not_wait():
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        watched = Watched(backend)
        fsdp.prefetch_forward_params()
        assert [e for e in watched.events if "gathers 0," in e]
        watched.clear()
        fsdp(noise(4, 6))
        assert not [e for e in watched.events if "gathers 0," in e]

    on_ranks(MESSAGES, RANKS, mlp, body)


@somewhere
def test_a_step_after_a_prefetch_is_seen_by_the_forward_pass(where: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        fsdp(noise(4, 6)).pow(2).sum().backward()
        fsdp.prefetch_forward_params()
        torch.optim.SGD(fsdp.parameters(), lr=0.1).step()
        output = fsdp(noise(4, 6))
        plain = mlp()
        plain.load_state_dict(fsdp.full_state_dict())
        torch.testing.assert_close(output, plain(noise(4, 6)))

    on_ranks(where, RANKS, mlp, body)


@somewhere
def test_a_write_that_was_not_announced_after_a_prefetch_is_seen_by_the_forward_pass(where: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        fsdp.prefetch_forward_params()
        with torch.no_grad():
            for parameter in fsdp.parameters():
                parameter.mul_(2)
        output = fsdp(noise(4, 6))
        plain = mlp()
        plain.load_state_dict(fsdp.full_state_dict())
        torch.testing.assert_close(output, plain(noise(4, 6)))

    on_ranks(where, RANKS, mlp, body)


@pytest.mark.parametrize("strategy", KEEPS, ids=str)
def test_strategies_that_keep_full_parameters_have_nothing_to_prefetch(strategy: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        error = outcome_of(fsdp.prefetch_forward_params)
        assert isinstance(error, UnsupportedOperationError)
        assert str(strategy) in str(error)
        assert f"rank {backend.rank}" in str(error)
        assert not fsdp.has_pending_prefetch()

    on_ranks(COOPERATIVE, RANKS, mlp, body)


@pytest.mark.parametrize("by_hand", [True, False])
def test_updated_shards_are_exchanged_by_hand_or_by_the_next_forward_pass(by_hand: bool):
    def body(model: nn.Module, backend: Backend) -> Tensor:
        fsdp = FSDP(model, backend, strategy=SHARD_GRAD_OP)
        step(fsdp)
        watched = Watched(backend)
        if by_hand:
            fsdp.broadcast_updated_params()
            assert len([e for e in watched.events if e.startswith("all_gather")]) == 3
            watched.clear()
            fsdp.broadcast_updated_params()
            assert watched.events == []
        output = fsdp(noise(4, 6))
        assert len([e for e in watched.events if e.startswith("all_gather")]) == 3 * (not by_hand)
        return output.detach()

    plain = mlp()
    plain(noise(4, 6)).pow(2).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found in on_ranks(MESSAGES, RANKS, mlp, body):
        torch.testing.assert_close(found, plain(noise(4, 6)).detach())


@pytest.mark.parametrize("strategy", [*GATHERS, NO_SHARD], ids=str)
def test_the_other_strategies_have_no_updates_to_exchange(strategy: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        step(fsdp)
        watched = Watched(backend)
        fsdp.broadcast_updated_params()
        assert watched.events == []

    on_ranks(MESSAGES, RANKS, mlp, body)


@somewhere
@pytest.mark.parametrize("strategy", [*GATHERS, *KEEPS], ids=str)
def test_shards_are_overwritten_from_one_flat_tensor(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        fsdp(noise(4, 6))
        flat = torch.cat([p.detach().flatten() for p in fsdp.parameters()])
        before = fsdp.full_state_dict()
        fsdp.update_shards(flat * 2)
        doubled = {name: value * 2 for name, value in before.items()}
        assert_same_bits([doubled, fsdp.full_state_dict()])
        plain = mlp()
        plain.load_state_dict(doubled)
        torch.testing.assert_close(fsdp(noise(4, 6)), plain(noise(4, 6)))

    on_ranks(where, RANKS, mlp, body)


@pytest.mark.parametrize("wrong", [lambda n: (n + 1,), lambda n: (n - 1,), lambda n: (n, 1)])
def test_a_flat_tensor_of_another_length_changes_nothing(wrong: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        before = fsdp.full_state_dict()
        count = sum(p.numel() for p in fsdp.parameters())
        shape = wrong(count)
        error = outcome_of(lambda: fsdp.update_shards(torch.zeros(shape)))
        assert isinstance(error, SizeMismatchError)
        for part in (f"rank {backend.rank}", f" {count} ", str(list(shape)), "nothing was changed"):
            assert part in str(error)
        assert_same_bits([before, fsdp.full_state_dict()])

    on_ranks(COOPERATIVE, RANKS, mlp, body)


def test_strategy_module_and_backend_are_what_was_given():
    def body(model: nn.Module, backend: Backend) -> None:
        for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, ShardingStrategy.hybrid(1)):
            fsdp = FSDP(model, backend, strategy=strategy)
            assert fsdp.strategy == strategy
            assert fsdp.module is model
            assert fsdp.backend is backend
            fsdp.unwrap()

    on_ranks(COOPERATIVE, RANKS, mlp, body)


@somewhere
@pytest.mark.parametrize("prefetch", [0, 1])
def test_all_groups_are_prefetched_whatever_prefetch_is(where: Any, prefetch: int):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, prefetch=prefetch)
        fsdp.prefetch_forward_params()
        states = [group.state.now for group in fsdp._runtime.groups]
        assert states == ["UNSHARDING"] * len(states)
        watched = Watched(backend)
        fsdp(noise(4, 6))
        assert not [event for event in watched.events if "gathers" in event]

    on_ranks(where, RANKS, mlp, body)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=str)
def test_a_strategy_is_given_by_its_name(strategy: ShardingStrategy):
    def body(model: nn.Module, backend: Backend) -> None:
        assert FSDP(model, backend, strategy=strategy.name).strategy is strategy
        with pytest.raises(TypeError, match="one of the names full_shard, shard_grad_op, no_shard"):
            FSDP(model, backend, strategy="full")

    on_ranks(COMMON, 1, mlp, body)
