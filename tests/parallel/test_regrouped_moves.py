"""`regrouped()`, and then the state comes from the memory of the ranks that had it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import MEMORY
from regrouped_runs import WAYS, Rank, assert_equal

from phalanx import Backend, DistributedError
from phalanx.elastic.moves import Holding, holding, move

MOVED = [
    *("ddp-top-k", "ddp-sharded-optimizer", "full-shard-top-k", "full-shard-sharded-optimizer"),
    *("full-shard-messages", "shard-grad-op", "no-shard", "local-sgd-top-k", "diloco-quantized"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


@pytest.mark.parametrize("name", MOVED)
def test_what_is_moved_is_what_a_checkpoint_would_give(name: str, folder: Path) -> None:
    """All change places, and a new rank comes, which is lost. So they regroup once more."""
    way = WAYS[name]

    def train(inner: Backend) -> tuple[Rank, Holding]:
        rank = Rank.new(way, inner)
        for number in range(4):
            rank.step(number)
        rank.save(folder)
        return rank, holding(inner.rank, rank.model, [rank.optimizer])

    def regroup(inner: Backend) -> Rank:
        rank, mine = held[(inner.rank + 1) % 3]
        rank.enter(inner)
        move([mine], rank.backend, rank.model, [rank.optimizer])
        return rank

    def regroup_in_vain(inner: Backend) -> None:
        if inner.rank < 3:
            with suppress(DistributedError):
                regroup(inner)
                raise AssertionError("it had to fail")
            return
        Rank.new(way).enter(inner)
        inner.abort()

    def go_on(rank: Rank) -> list[Any]:
        states = [rank.state()]
        rank.step(7)
        return [*states, rank.state()]

    held = way.cluster.run(train, 3)
    way.cluster.run(regroup_in_vain, 4)
    fresh = way.cluster.run(lambda inner: go_on(Rank.new(way, inner).load(folder)), 3)
    found = way.cluster.run(lambda inner: go_on(regroup(inner)), 3)
    for place, states in enumerate(fresh):
        for one, expected in zip(found[place], states, strict=True):
            assert_equal(one, expected, f"rank {place}:")
