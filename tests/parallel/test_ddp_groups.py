"""DDP on some of the ranks: groups that train beside each other, or hold one rank only."""

from __future__ import annotations

import pytest
from ddp_models import mlp, noise
from ddp_runs import Gradients, assert_close, gradients, naive_gradients
from torch import nn

from phalanx import DDP, Backend, simulate


def backward(model: nn.Module, seed: int) -> None:
    model(noise(4, 6, seed=seed)).pow(2).sum().backward()


def expected(ranks: list[int]) -> Gradients:
    return naive_gradients(mlp, len(ranks), lambda model, i: backward(model, 10 + ranks[i]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2, 3], [1]], [[3, 1], [0, 2]]])
def test_each_group_averages_over_its_own_ranks(groups: list[list[int]], seed: int):
    def run(backend: Backend) -> Gradients:
        mine = next(group for group in groups if backend.rank in group)
        ddp = DDP(mlp(mine[0]), backend.subgroup(mine), bucket_size=100)
        ddp.module.load_state_dict(mlp().state_dict())
        for number in range(2):
            ddp.zero_grad()
            backward(ddp, 10 * number + backend.rank)
        return gradients(ddp)

    for rank, found in enumerate(simulate(run, 4, seed)):
        assert_close(found, expected(next(group for group in groups if rank in group)))


def test_two_models_on_overlapping_groups_train_at_the_same_time():
    def run(backend: Backend) -> list[Gradients]:
        wrapped = [DDP(mlp(), backend, bucket_size=1)]
        if backend.rank != 0:
            wrapped.append(DDP(mlp(), backend.subgroup([1, 2]), bucket_size=1))
        x = noise(4, 6, seed=10 + backend.rank)
        sum(ddp(x).pow(2).sum() for ddp in wrapped).backward()
        return [gradients(ddp) for ddp in wrapped]

    for rank, found in enumerate(simulate(run, 3)):
        assert_close(found[0], expected([0, 1, 2]))
        if rank:
            assert_close(found[1], expected([1, 2]))
