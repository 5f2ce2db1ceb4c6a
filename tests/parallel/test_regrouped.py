"""`regrouped()`: wrappers go on in another group, as if they were built in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import MEMORY
from ddp_models import mlp
from forms import sizes
from local_runs import plain_sgd
from regrouped_runs import HYBRID, WAYS, Rank, Way, assert_equal, first_group
from torch import nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    DiLoCo,
    InvalidWorldSizeError,
    LocalSGD,
    MisuseError,
    Pipeline,
    PipelineParallelConfig,
    ShardedOptimizer,
    SimulatedBackend,
    UnsupportedOperationError,
    parallelize,
    simulate,
)
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.torch_internals import post_accumulate_hooks

CHAIN = [[2, 0], [None, 0, 1, None], *sizes([], [[3, 1, 0, 2], [2]])]
"""Of 3 ranks the last and the first are left; two come; all change places; one is left."""
CHAIN_OF_PAIRS = [[3, 0], [None, 0, 1, None], *sizes([], [[3, 1, 0, 2], [2, 1]])]
KINDS = {name: WAYS[name] for name in ("ddp", "full-shard", "local-sgd", "diloco")}
every_kind = pytest.mark.parametrize("way", KINDS.values(), ids=KINDS)


def alone() -> Backend:
    return SimulatedBackend.create_group(1)[0]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


@pytest.mark.parametrize("name", WAYS)
def test_each_group_goes_on_as_wrappers_that_are_built_in_it(name: str, folder: Path) -> None:
    """They load the last one's checkpoint, and train; the next one begins with theirs."""
    way, pairs = WAYS[name], name.startswith("hybrid")

    def train(rank: Rank, number: int) -> list[Any]:
        states = [rank.load(folder / str(number)).state()]
        for step in (10, 11):
            rank.step(step)
            states.append(rank.state())
        return states

    def build(inner: Backend, number: int) -> list[Any]:
        return train(Rank.new(way, inner), number)

    def go_on(inner: Backend, number: int, before: Sequence[Rank | None]) -> tuple[Rank, Any]:
        rank = (before[inner.rank] or Rank.new(way)).enter(inner)
        states = train(rank, number)
        return rank.save(folder / str(number + 1)), states

    ranks = first_group(way, 4 if pairs else 3, folder / "0")
    for number, places in enumerate(CHAIN_OF_PAIRS if pairs else CHAIN):
        before = [None if place is None else ranks[place] for place in places]
        fresh = way.cluster.run(partial(build, number=number), len(places))
        found = way.cluster.run(partial(go_on, number=number, before=before), len(places))
        for place, expected in enumerate(fresh):
            for at, state in enumerate(expected):
                assert_equal(found[place][1][at], state, f"rank {place} of group {number}, {at}:")
        ranks = [rank for rank, _ in found]


# What stays, and what does not --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp", "local-sgd", "diloco"])
def test_replicas_stay_where_they_are_and_lose_their_gradients(name: str) -> None:
    def train(inner: Backend) -> tuple[Rank, Any]:
        rank = Rank.new(WAYS[name], inner)
        rank.step(0)
        return rank, {n: (p, p.data_ptr(), p.clone()) for n, p in rank.model.named_parameters()}

    rank, before = simulate(train, 3)[1]
    rank.enter(alone())
    after = dict(rank.model.named_parameters())
    assert after.keys() == before.keys()
    for n, (parameter, place, value) in before.items():
        assert after[n] is parameter
        assert (parameter.data_ptr(), parameter.grad) == (place, None)
        assert torch.equal(parameter, value)


@pytest.mark.parametrize(
    "name", [name for name in WAYS if name.startswith(("full-shard", "shard-grad", "hybrid"))]
)
def test_old_shards_are_there_until_nobody_has_them(name: str) -> None:
    """Parameters are the same objects; what `detach` gave of them before is the old shards."""

    def train(inner: Backend) -> tuple[Rank, Any, Any]:
        rank = Rank.new(WAYS[name], inner)
        rank.step(0)
        named, slices = dict(rank.model.named_parameters()), rank.model.slices()
        old = {n: (slices[n], p.detach(), p.detach().clone()) for n, p in named.items()}
        return rank, named, old

    def go_on(inner: Backend) -> Any:
        rank, named, _ = ranks[1 - inner.rank]
        rank.enter(inner)
        assert all(named[n] is p for n, p in rank.model.named_parameters())
        with rank.model.writing(), torch.no_grad():
            for p in named.values():
                assert p.grad is None
                p.fill_(7)
        return rank.model.slices()

    cluster = WAYS[name].cluster
    ranks = cluster.run(train, 4)
    slices = cluster.run(go_on, 2)
    for _, named, old in ranks[:2]:
        for n, (_, taken, value) in old.items():
            assert torch.equal(taken, value), n
            assert named[n].eq(7).all()
    for n, one in slices[0].items():
        assert one.is_whole or one.stop == slices[1][n].start


@pytest.mark.parametrize("name", ["no-shard", "full-shard-messages"])
def test_a_part_that_is_the_same_as_before_stays_where_it_is(name: str) -> None:
    def train(inner: Backend) -> tuple[Rank, Any]:
        rank = Rank.new(WAYS[name], inner)
        rank.step(0)
        return rank, [(p.data_ptr(), p.tolist()) for p in rank.model.parameters()]

    def go_on(inner: Backend) -> None:
        rank, before = ranks[inner.rank]
        rank.enter(inner)
        assert [(p.data_ptr(), p.tolist()) for p in rank.model.parameters()] == before

    ranks = WAYS[name].cluster.run(train, 2)
    WAYS[name].cluster.run(go_on, 2)


@pytest.mark.parametrize("name", ["ddp-top-k", "full-shard-top-k", "local-sgd-top-k"])
def test_own_state_begins_anew(name: str) -> None:
    """Though no state is loaded, as from before the first step."""

    def train(inner: Backend) -> Rank:
        rank = Rank.new(WAYS[name], inner)
        rank.step(0)
        return rank

    rank = simulate(train, 2)[1]
    rank.enter(alone())
    assert_equal(rank.model.own_state(), Rank.new(WAYS[name]).model.own_state())


@every_kind
def test_hooks_do_not_become_more(way: Way) -> None:
    def count(rank: Rank) -> list[int]:
        modules = [m for m in rank.model.modules() if not isinstance(m, nn.BatchNorm1d)]
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
        return hooks + [len(post_accumulate_hooks(p)) for p in rank.model.parameters()]

    rank = Rank.new(way)
    before = count(rank)
    for number in range(10):
        rank.enter(alone()).step(number)
    assert count(rank) == before


@pytest.mark.parametrize("name", ["ddp-top-k", "no-shard", "local-sgd-top-k", "diloco"])
def test_a_rank_waits_for_nobody(name: str) -> None:
    """Of the next group there is only this one yet."""
    rank = Rank.new(WAYS[name])
    rank.step(0)
    rank.enter(SimulatedBackend.create_group(3)[1])
    assert rank.model.bytes_sent == 0


def test_a_hybrid_waits_alone_for_its_group() -> None:
    """Built in a world of one it holds whole parameters; a group of another number is refused."""
    with pytest.raises(InvalidWorldSizeError, match="multiple of 2"):
        FSDP(mlp(), alone(), strategy=HYBRID)
    rank = Rank.new(WAYS["hybrid"])
    before = rank.model.slices()
    assert all(each.is_whole for each in before.values())
    with pytest.raises(InvalidWorldSizeError, match="multiple of 2, and there are 3 ranks"):
        rank.enter(SimulatedBackend.create_group(3)[0])
    assert rank.model.slices() == before


@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_a_sharded_optimizer_is_regrouped_after_its_model(kind: Any) -> None:
    backend = ReplaceableBackend(alone())
    model = kind(mlp(), backend)
    optimizer = ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.3
    backend.enter(alone())
    model.regrouped()
    with pytest.raises(MisuseError, match=r"regrouped\(\) of this one"):
        optimizer.step()
    optimizer.regrouped()
    optimizer.step()
    assert optimizer.inner is not None
    assert optimizer.inner.param_groups[0]["lr"] == 0.3


# What is refused ----------------------------------------------------------------------------------


def piped(backend: Backend) -> Any:
    return Pipeline(mlp(), backend, PipelineParallelConfig(1, 1))


def cut(backend: Backend) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return DDP(parallelize(model, backend, {"0": "column", "1": "row"}), backend)


def on_a_mesh(backend: Backend) -> Any:
    return FSDP(mlp(), DeviceMesh(backend, (1, 1), ("data", "tensor"))["data"])


def without_values(backend: Backend) -> Any:
    return LocalSGD(nn.Linear(2, 2, device="meta"), backend, every=2)


REFUSED = {
    piped: "each of its ranks has other layers",
    cut: "it has a ColumnParallelLinear",
    on_a_mesh: "its backend is some ranks of another one",
    without_values: "meta device",
}


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_what_cannot_go_on_is_refused_in_words(build: Any) -> None:
    backend = ReplaceableBackend(alone())
    model = build(backend)
    backend.enter(alone())
    with pytest.raises(UnsupportedOperationError, match=rf"^rank 0: \w+: .*{REFUSED[build]}"):
        model.regrouped()


def average(model: Any) -> Any:
    return model.averaged()


IN_CONTEXTS = {
    "no_sync": lambda backend: DDP(mlp(), backend).no_sync,
    "step": lambda backend: partial(LocalSGD(mlp(), backend, every=2).step, 0, micro_batches=0),
    "averaged": lambda backend: DiLoCo(mlp(), backend, every=2, outer=plain_sgd).averaged,
    "summon_full_params": lambda backend: FSDP(mlp(), backend).summon_full_params,
}


@pytest.mark.parametrize("name", IN_CONTEXTS)
def test_a_context_is_left_first(name: str) -> None:
    backend = ReplaceableBackend(alone())
    context = IN_CONTEXTS[name](backend)
    model = getattr(context, "func", context).__self__
    with context(), pytest.raises(MisuseError, match=rf"regrouped\(\) inside .*{name}"):
        model.regrouped()
    model.regrouped()
