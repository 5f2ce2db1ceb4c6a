"""`regrouped()` after a rank was lost in the middle of a step: nothing of that step is left."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import MEMORY
from ddp_models import loss_of
from regrouped_runs import WAYS, Rank, Way, assert_equal, batch
from torch import Tensor

from phalanx import Backend, DistributedError, MisuseError, SimulatedBackend

LOST = 1


class Killed(Exception):
    """In the place of a signal."""


def die(backend: Backend) -> None:
    backend.abort()
    raise Killed


def in_forward(rank: Rank, _: Tensor) -> None:
    die(rank.backend)


def in_backward(rank: Rank, hidden: Tensor) -> None:
    hidden.register_hook(lambda _: die(rank.backend))


def before_the_step(rank: Rank, _: Tensor) -> None:
    rank.optimizer.register_step_pre_hook(lambda *_: die(rank.backend))


def after_the_step(rank: Rank, _: Tensor) -> None:
    rank.optimizer.register_step_post_hook(lambda *_: die(rank.backend))


MOMENTS = [in_forward, in_backward, before_the_step, after_the_step]
OF_EACH_KIND = ["ddp-top-k", "full-shard", "full-shard-messages", "shard-grad-op", "hybrid-top-k"]
CASES = [
    *((name, in_backward) for name in WAYS),
    *((name, moment) for name in OF_EACH_KIND for moment in MOMENTS if moment is not in_backward),
    ("full-shard-sharded-optimizer", after_the_step),
    ("local-sgd-top-k", after_the_step),
    ("diloco-quantized", after_the_step),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


def break_off(rank: Rank, moment: Callable[[Rank, Tensor], None]) -> list[Tensor]:
    """Begin a step in which a rank is lost. Returns the loss, if it came to one, with its graph."""
    found: list[Tensor] = []
    inputs, targets = batch(rank.backend.rank, 7)
    if rank.backend.rank == LOST:
        rank.model.module.look = partial(moment, rank)
    with suppress(DistributedError, Killed):
        if rank.way.step is not None:
            rank.step(7)
        rank.optimizer.zero_grad()
        found.append(loss_of(rank.model(inputs), targets))
        found[0].backward(retain_graph=True)
        rank.optimizer.step()
        rank.backend.barrier()
    return found


def lose_one(
    way: Way, ranks: int, moment: Callable[[Rank, Tensor], None], folder: Path
) -> Sequence[tuple[Rank, list[Tensor]]]:
    """Ranks that have trained and saved, and one of which is lost in a step; its loss, if any."""

    def train(inner: Backend) -> tuple[Rank, list[Tensor]]:
        rank = Rank.new(way, inner)
        rank.step(0)
        rank.step(1)
        rank.save(folder)
        return rank, break_off(rank, moment)

    return way.cluster.run(train, ranks)


@pytest.mark.parametrize(("name", "moment"), CASES)
def test_those_who_are_left_go_on_from_the_checkpoint(
    name: str, moment: Callable[[Rank, Tensor], None], folder: Path
) -> None:
    """With a new one in the place of the lost one; as the same ranks, or in another order."""
    way = WAYS[name]
    ranks = lose_one(way, 4 if name.startswith("hybrid") else 3, moment, folder)
    before = [None if place == LOST else rank for place, (rank, _) in enumerate(ranks)]
    before = before if moment is before_the_step else before[::-1]

    def train(rank: Rank) -> Any:
        rank.load(folder).step(7)
        return rank.state()

    fresh = way.cluster.run(lambda inner: train(Rank.new(way, inner)), len(before))
    found = way.cluster.run(
        lambda inner: train((before[inner.rank] or Rank.new(way)).enter(inner)), len(before)
    )
    for place, state in enumerate(fresh):
        assert_equal(found[place], state, f"rank {place}:")


@pytest.mark.parametrize("name", ["full-shard", "full-shard-messages"])
def test_what_was_accumulated_and_prefetched_is_forgotten(name: str, folder: Path) -> None:
    """Also if the old group is whole."""
    way = WAYS[name]

    def prepare(inner: Backend) -> Rank:
        rank = Rank.new(way, inner)
        rank.step(0)
        rank.save(folder)
        with rank.model.no_sync():
            rank.model(batch(inner.rank, 1)[0]).sum().backward()
        rank.model.prefetch_forward_params()
        return rank

    def train(rank: Rank) -> Any:
        rank.load(folder).step(7)
        return rank.state()

    ranks = way.cluster.run(prepare, 3)
    fresh = way.cluster.run(lambda inner: train(Rank.new(way, inner)), 2)
    found = way.cluster.run(lambda inner: train(ranks[1 - inner.rank].enter(inner)), 2)
    for place, state in enumerate(fresh):
        assert_equal(found[place], state, f"rank {place}:")


@pytest.mark.parametrize("name", ["ddp-top-k", "full-shard", "shard-grad-op"])
def test_a_rank_may_be_lost_while_others_regroup(name: str, folder: Path) -> None:
    """Then they do so again, in the next group."""
    way = WAYS[name]
    before = [rank for rank, _ in lose_one(way, 3, in_backward, folder)]

    def regroup_in_vain(inner: Backend) -> None:
        if inner.rank == LOST:
            inner.abort()
            return
        with suppress(DistributedError):
            before[inner.rank].enter(inner)
            inner.barrier()
            raise AssertionError("it had to fail")

    def train(rank: Rank) -> Any:
        rank.load(folder).step(7)
        return rank.state()

    way.cluster.run(regroup_in_vain, 3)
    fresh = way.cluster.run(lambda inner: train(Rank.new(way, inner)), 2)
    found = way.cluster.run(lambda inner: train(before[2 * inner.rank].enter(inner)), 2)
    for place, state in enumerate(fresh):
        assert_equal(found[place], state, f"rank {place}:")


with_a_graph = pytest.mark.parametrize("name", ["ddp-top-k", "full-shard", "full-shard-messages"])


@with_a_graph
def test_a_backward_pass_through_a_graph_of_before_is_refused(name: str, folder: Path) -> None:
    found = [each for each in lose_one(WAYS[name], 3, in_backward, folder) if each[1]]
    assert found
    for rank, (loss,) in found:
        rank.enter(SimulatedBackend.create_group(1)[0])
        for _ in range(2):
            with pytest.raises(MisuseError, match=r"regrouped\(\).*: run forward again"):
                loss.backward(retain_graph=True)


@with_a_graph
@pytest.mark.parametrize("moment", [in_forward, in_backward, before_the_step])
def test_with_its_graph_all_of_a_pass_is_gone(
    name: str, moment: Callable[[Rank, Tensor], None], folder: Path
) -> None:
    """Before the garbage collector finds it. Full parameters do not stay so long."""
    found = lose_one(WAYS[name], 3, moment, folder)
    gc.collect()
    gc.disable()
    try:
        for rank, graph in found:
            passes = rank.model.passes
            groups = getattr(passes, "groups", [])
            old = [weakref.ref(each) for each in (passes, *groups)]
            flats = [flat for group in groups for flat in group.flats if flat.apart]
            full = [flat.unsharded.untyped_storage() for flat in flats]
            del passes, groups, flats
            rank.enter(SimulatedBackend.create_group(1)[0])
            assert sum(storage.nbytes() for storage in full) == 0
            graph.clear()
            assert [each() for each in old] == [None] * len(old)
    finally:
        gc.enable()
