"""Saving and loading over every kind of backend."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_runs import adamw, assert_same, cut_like, small, state_of, trained
from clusters import Cluster
from flat_shards import FlatShards, step_with

from phalanx import DDP, Backend, load_checkpoint, save_checkpoint


def test_a_checkpoint_goes_over_every_backend(cluster: Cluster, folder: Path) -> None:
    def run(backend: Backend) -> None:
        replicas = DDP(small(), backend)
        optimizer = trained(replicas)
        expected = state_of(replicas, optimizer)
        pending = save_checkpoint(
            folder, model=replicas, optimizer=optimizer, step=2, extra={"seen": 7}, async_save=True
        )
        step_with(replicas, optimizer, 9)
        pending.wait()
        sharded = FlatShards(small(seed=4), backend)
        fresh = adamw(sharded)
        loaded = load_checkpoint(folder, model=sharded, optimizer=fresh)
        assert loaded == (2, {"seen": 7}, pending.folder, 3, None)
        assert_same(state_of(sharded, fresh), cut_like(sharded, expected))
        save_checkpoint(folder, model=sharded, optimizer=fresh, step=3)
        load_checkpoint(folder, model=replicas, optimizer=optimizer)
        assert_same(state_of(replicas, optimizer), expected)

    cluster.run(run, 3)


def test_ranks_of_one_group_may_save_beside_another(folder: Path) -> None:
    """A group of some ranks saves its own model into a folder of its own."""
    from clusters import Simulated

    def run(backend: Backend) -> None:
        group = backend.subgroup([backend.rank - backend.rank % 2, backend.rank // 2 * 2 + 1])
        model = FlatShards(small(seed=backend.rank // 2), group)
        mine = folder / str(backend.rank // 2)
        save_checkpoint(mine, model=model, step=backend.rank // 2)

    Simulated().run(run, 4)
    for number in range(2):
        model = small(seed=9)
        assert load_checkpoint(folder / str(number), model=model).step == number
        expected = small(seed=number)
        assert torch.equal(model[0].weight, expected[0].weight)  # type: ignore[index]
