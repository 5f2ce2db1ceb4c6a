"""Ways to run FSDP in a test, and to put together what its ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from clusters import Cluster, Cooperative, SharedMemory, Simulated, Tcp
from ddp_runs import Gradients
from torch import Tensor, nn

from phalanx import FSDP, Backend, ShardingStrategy
from phalanx.parallel.wrapper import Slice

FULL_SHARD = ShardingStrategy.FULL_SHARD
SHARD_GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
NO_SHARD = ShardingStrategy.NO_SHARD
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]

COOPERATIVE = Cooperative()  # one rank at a time; common memory
COMMON = Simulated()  # ranks run freely; full parameters exist once
MESSAGES = Tcp()  # every rank has its own
SHM = SharedMemory()
CLUSTERS: dict[str, Cluster] = {"common": COMMON, "messages": MESSAGES}

Way = tuple[ShardingStrategy, Cluster]
WAYS: list[Way] = [
    (FULL_SHARD, COMMON),
    (FULL_SHARD, MESSAGES),
    (SHARD_GRAD_OP, MESSAGES),
    (NO_SHARD, COMMON),
]
"""Every strategy, and both ways to unshard: what most promises are tried on."""

WITH_HYBRID: list[Way] = [*WAYS, (ShardingStrategy.hybrid(1), COMMON)]

Pieces = dict[str, tuple[Slice, "Tensor | None"]]


def every_way(ways: Sequence[Way] = WAYS) -> pytest.MarkDecorator:
    """A test that takes `strategy` and `where` is run on each of these."""
    ids = [f"{strategy}-{where.name}" for strategy, where in ways]
    return pytest.mark.parametrize(("strategy", "where"), ways, ids=ids)


def every_way_of_ranks(
    ways: Sequence[tuple[int, ShardingStrategy, Cluster]],
) -> pytest.MarkDecorator:
    """A test that takes `ranks`, `strategy` and `where` is run on each of these."""
    ids = [f"{ranks}-{strategy}-{where.name}" for ranks, strategy, where in ways]
    return pytest.mark.parametrize(("ranks", "strategy", "where"), ways, ids=ids)


def on_ranks(
    cluster: Cluster,
    size: int,
    build: Callable[[], nn.Module],
    body: Callable[[nn.Module, Backend], Any],
) -> list[Any]:
    """Run `body(model, backend)` on every rank, with a model of its own.

    Models are built before: what draws their values is not to be shared by threads.
    """
    models = [build() for _ in range(size)]
    return cluster.run(lambda backend: body(models[backend.rank], backend), size)


def gradient_pieces(fsdp: FSDP) -> Pieces:
    """What this rank has of each gradient; a copy."""
    return _pieces(fsdp, lambda p: None if p.grad is None else p.grad.detach().clone())


def value_pieces(fsdp: FSDP) -> Pieces:
    """What this rank has of each parameter; a copy."""
    return _pieces(fsdp, lambda p: p.detach().clone())


def _pieces(fsdp: FSDP, of: Callable[[nn.Parameter], Tensor | None]) -> Pieces:
    slices = fsdp.slices()
    return {name: (slices[name], of(p)) for name, p in fsdp.named_parameters()}


def joined(per_rank: Sequence[Pieces]) -> Gradients:
    """Whole tensors out of the pieces of all ranks, which cover each of them.

    Ranks that have the same elements have the same bits; None is None on every rank.
    """
    return {name: _join(name, [pieces[name] for pieces in per_rank]) for name in per_rank[0]}


def _join(name: str, pieces: list[tuple[Slice, Tensor | None]]) -> Tensor | None:
    given = [piece for _, piece in pieces if piece is not None]
    if not given:
        return None
    assert len(given) == len(pieces), f"{name} is None on some ranks only"
    shape = pieces[0][0].shape
    whole = torch.empty(shape, dtype=given[0].dtype).reshape(-1)
    covered = torch.zeros(whole.numel(), dtype=torch.bool)
    for (where, _), piece in zip(pieces, given, strict=True):
        flat = piece.reshape(-1)
        assert where.shape == shape
        assert flat.numel() == where.numel, f"{name} is not what slices() says"
        seen = covered[where.start : where.stop]
        assert torch.equal(whole[where.start : where.stop][seen], flat[seen]), name
        whole[where.start : where.stop] = flat
        covered[where.start : where.stop] = True
    assert covered.all(), f"no rank has all of {name}"
    return whole.view(shape)


def alone(build: Callable[[], nn.Module], losses: Sequence[Callable[[nn.Module], Tensor]]) -> Any:
    """The plain model's gradient of the mean of these losses, one of each rank."""
    model = build()
    sum(loss(model) for loss in losses).div(len(losses)).backward()  # type: ignore[union-attr]
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }
