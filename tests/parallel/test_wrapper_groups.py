"""Wrappers on some of the ranks: groups that train beside each other, or hold one rank only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clusters import Hybrid, SubOf
from ddp_models import mlp, noise
from ddp_runs import Gradients, Watched, assert_close, assert_same_bits, naive_gradients
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
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
from wrappings import Wrapping, every_wrapping

from phalanx import DDP, FSDP, Backend, ShardingStrategy, simulate
from phalanx.parallel.wrapper import Slice

hybrid = ShardingStrategy.hybrid


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(noise(4, 6, seed=rank)).pow(2).sum()


def assert_trains(wrap: Wrapping, ranks: int) -> None:
    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)
        loss_of(wrapped, backend.rank).backward()
        torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
        return gradient_pieces(wrapped), wrap.state(wrapped)

    found = wrap.on_ranks(ranks, mlp, body)
    wanted = alone(mlp, [lambda m, r=rank: loss_of(m, r) for rank in range(ranks)])
    assert_close(joined([pieces for pieces, _ in found]), wanted)
    after = {name: value - 0.1 * wanted[name] for name, value in mlp().state_dict().items()}
    for _, state in found:
        assert_close(state, after)
    assert_same_bits([state for _, state in found])


@pytest.mark.checkered
@pytest.mark.parametrize("where", [SubOf(COMMON), SubOf(MESSAGES)], ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DDP, {}),
        (FSDP, {"strategy": FULL_SHARD}),
        (FSDP, {"strategy": SHARD_GRAD_OP}),
        (FSDP, {"strategy": hybrid(2)}),
    ],
    ids=["ddp", "full_shard", "shard_grad_op", "hybrid"],
)
def test_it_trains_on_part_of_the_ranks(kind: Any, options: Any, where: Any):
    assert_trains(Wrapping(kind, options, where), 4)


@pytest.mark.checkered
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2, 3], [1]], [[3, 1], [0, 2]]])
@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_each_group_averages_over_its_own_ranks(kind: Any, groups: list[list[int]], seed: int):
    def run(backend: Backend) -> Any:
        mine = next(group for group in groups if backend.rank in group)
        model = mlp(mine[0])
        model.load_state_dict(mlp().state_dict())
        wrapped = kind(model, backend.subgroup(mine))
        for number in range(2):
            wrapped.zero_grad()
            loss_of(wrapped, 10 * number + backend.rank).backward()
        return gradient_pieces(wrapped)

    ranks = simulate(run, 4, seed)
    for group in groups:
        wanted = naive_gradients(
            mlp, len(group), lambda m, i, group=group: loss_of(m, 10 + group[i]).backward()
        )
        assert_close(joined([ranks[rank] for rank in group]), wanted)


@every_wrapping
def test_models_on_overlapping_groups_train_side_by_side(wrap: Wrapping):
    """Ranks 0 1 have one, 1 2 another, and all three a third."""
    parts = {"l": ([0, 1], 0), "r": ([1, 2], 2), "all": ([0, 1, 2], 4)}

    def loss(layer: nn.Module, width: int, rank: int) -> Tensor:
        return layer(noise(2, width, seed=rank)).pow(2).sum()

    def body(model: nn.Module, backend: Backend) -> Any:
        made = {}
        for name, (members, number) in parts.items():
            if backend.rank in members:
                group = backend if len(members) == 3 else backend.subgroup(members)
                width = model[number].in_features
                made[name] = wrap(model[number], group), width
        sum(loss(wrapped, width, backend.rank) for wrapped, width in made.values()).backward()
        return {name: gradient_pieces(wrapped) for name, (wrapped, _) in made.items()}

    ranks = wrap.on_ranks(3, mlp, body)
    for name, (members, number) in parts.items():
        wanted: Gradients = alone(
            lambda n=number: mlp()[n],
            [lambda m, r=rank: loss(m, m.in_features, r) for rank in members],
        )
        assert_close(joined([ranks[rank][name] for rank in members]), wanted)


# Copies of shards between groups ---------------------------------------------------------------


@pytest.mark.checkered
@pytest.mark.parametrize(("ranks", "k"), [(4, 1), (4, 2), (4, 4), (6, 2), (6, 3)])
@pytest.mark.parametrize("where", [COMMON, MESSAGES, Hybrid()], ids=lambda c: c.name)
def test_hybrid_is_one_model_for_every_size_of_its_groups(ranks: int, k: int, where: Any):
    assert_trains(Wrapping(FSDP, {"strategy": hybrid(k)}, where), ranks)


def test_hybrid_cuts_over_consecutive_ranks_and_copies_between_them():
    def body(model: nn.Module, backend: Backend) -> Any:
        return FSDP(model, backend, strategy=hybrid(2)).slices()["weight"]

    first, second = Slice((4, 3), 0, 6), Slice((4, 3), 6, 12)
    ranks = on_ranks(COOPERATIVE, 6, lambda: nn.Linear(3, 4, bias=False), body)
    assert ranks == [first, second] * 3


def test_hybrid_unshards_and_reduces_nothing_over_all_ranks_at_once():
    def body(model: nn.Module, backend: Backend) -> list[str]:
        fsdp = FSDP(model, backend, strategy=hybrid(2))
        watched = Watched(backend)
        loss_of(fsdp, backend.rank).backward()
        return watched.events

    for events in on_ranks(MESSAGES, 4, lambda: nn.Linear(6, 4, bias=False), body):
        assert not [event for event in events if "gather" in event or "scatter" in event]


def test_values_are_rank_0_s_whatever_the_others_began_with():
    def body(model: nn.Module, backend: Backend) -> Any:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(backend.rank)
        fsdp = FSDP(model, backend, strategy=hybrid(2))
        return value_pieces(fsdp)

    for where in (COMMON, MESSAGES):
        assert_same_bits([dict(mlp().state_dict()), joined(on_ranks(where, 4, mlp, body))])
