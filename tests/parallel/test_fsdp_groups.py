"""FSDP over groups: parts of a world, and copies of shards between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clusters import Hybrid, SubOf
from ddp_models import mlp, noise
from ddp_runs import Watched, assert_close, assert_same_bits
from fsdp_runs import (
    BATON,
    COMMON,
    FULL_SHARD,
    MESSAGES,
    SHARD_GRAD_OP,
    alone,
    gradient_pieces,
    joined,
    on_ranks,
    value_pieces,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, ShardingStrategy
from phalanx.parallel.wrapper import Slice

hybrid = ShardingStrategy.hybrid


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(noise(4, 6, seed=rank)).pow(2).sum()


def assert_trains(where: Any, ranks: int, **options: Any) -> None:
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, **options)
        loss_of(fsdp, backend.rank).backward()
        torch.optim.SGD(fsdp.parameters(), lr=0.1).step()
        return gradient_pieces(fsdp), fsdp.full_state_dict()

    found = on_ranks(where, ranks, mlp, body)
    wanted = alone(mlp, [lambda m, r=rank: loss_of(m, r) for rank in range(ranks)])
    assert_close(joined([pieces for pieces, _ in found]), wanted)
    after = {name: value - 0.1 * wanted[name] for name, value in mlp().state_dict().items()}
    for _, state in found:
        assert_close(state, after)
    assert_same_bits([state for _, state in found])


@pytest.mark.parametrize("where", [SubOf(COMMON), SubOf(MESSAGES)], ids=lambda c: c.name)
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, hybrid(2)], ids=str)
def test_it_trains_on_part_of_the_ranks(strategy: ShardingStrategy, where: Any):
    assert_trains(where, 4, strategy=strategy)


@pytest.mark.checkered
@pytest.mark.parametrize(("ranks", "k"), [(4, 1), (4, 2), (4, 4), (6, 2), (6, 3)])
@pytest.mark.parametrize("where", [COMMON, MESSAGES, Hybrid()], ids=lambda c: c.name)
def test_hybrid_is_one_model_for_every_size_of_its_groups(ranks: int, k: int, where: Any):
    assert_trains(where, ranks, strategy=hybrid(k))


def test_hybrid_cuts_over_consecutive_ranks_and_copies_between_them():
    def body(model: nn.Module, backend: Backend) -> Any:
        return FSDP(model, backend, strategy=hybrid(2)).slices()["weight"]

    first, second = Slice((4, 3), 0, 6), Slice((4, 3), 6, 12)
    build = lambda: nn.Linear(3, 4, bias=False)  # noqa: E731
    assert on_ranks(BATON, 6, build, body) == [first, second] * 3


def test_hybrid_unshards_and_reduces_nothing_over_all_ranks_at_once():
    def body(model: nn.Module, backend: Backend) -> list[str]:
        fsdp = FSDP(model, backend, strategy=hybrid(2))
        watched = Watched(backend)
        loss_of(fsdp, backend.rank).backward()
        return watched.events

    build = lambda: nn.Linear(6, 4, bias=False)  # noqa: E731
    for events in on_ranks(MESSAGES, 4, build, body):
        assert not [event for event in events if "gather" in event or "scatter" in event]


def test_two_models_on_overlapping_groups_train_side_by_side():
    """Ranks 0 1 have one, 1 2 another, and all three a third."""

    def body(model: nn.Module, backend: Backend) -> Any:
        left = backend.subgroup([0, 1]) if backend.rank < 2 else None
        right = backend.subgroup([1, 2]) if backend.rank > 0 else None
        found = {}
        made = {}
        for name, group, number in (("l", left, 0), ("r", right, 2), ("all", backend, 4)):
            if group is not None:
                made[name] = FSDP(model[number], group)
        for name, fsdp in made.items():
            width = fsdp.slices()["weight"].shape[1]
            fsdp(noise(2, width, seed=backend.rank)).pow(2).sum().backward()
            found[name] = gradient_pieces(fsdp)
        return found

    for where in (COMMON, MESSAGES):
        ranks = on_ranks(where, 3, mlp, body)
        for name, members, number in (("l", [0, 1], 0), ("r", [1, 2], 2), ("all", [0, 1, 2], 4)):
            width = mlp()[number].in_features
            losses = [
                lambda m, r=rank, w=width: m(noise(2, w, seed=r)).pow(2).sum() for rank in members
            ]
            wanted = alone(lambda n=number: mlp()[n], losses)
            assert_close(joined([ranks[rank][name] for rank in members]), wanted)


def test_values_are_rank_0_s_whatever_the_others_began_with():
    def body(model: nn.Module, backend: Backend) -> Any:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(backend.rank)
        fsdp = FSDP(model, backend, strategy=hybrid(2))
        return value_pieces(fsdp)

    for where in (COMMON, MESSAGES):
        assert_same_bits([dict(mlp().state_dict()), joined(on_ranks(where, 4, mlp, body))])
