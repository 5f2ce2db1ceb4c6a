"""Which ranks share one copy of the parameters, and which hold the same shard."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.backends.base import Backend
from phalanx.parallel.fsdp.strategy import ShardingStrategy


class Ranks(NamedTuple):
    """The groups of one rank, for 4 ranks and `hybrid(2)`:

        shards      (0 1)    (2 3)      among these shards are cut: gather, reduce-scatter
        replicas    (0 2)    (1 3)      these hold the same shard: gradients are averaged

    world      all ranks
    shards     the group of this rank over which shards are cut; None if it is alone in it
    replicas   the ranks that hold the same shard; None if it alone does
    size       how many shards a copy has
    place      which one this rank holds
    """

    world: Backend
    shards: Backend | None
    replicas: Backend | None
    size: int
    place: int


def ranks_of(backend: Backend, strategy: ShardingStrategy) -> Ranks:
    """This rank's groups. Every rank of `backend` calls this; `InvalidWorldSizeError` may come."""
    world = backend.world_size
    size = strategy.ranks_per_copy(world)
    copy, place = divmod(backend.rank, size)
    shards = replicas = None
    if size == world:
        shards = backend if world > 1 else None
    elif size == 1:
        replicas = backend
    else:
        shards = backend.subgroup(range(copy * size, (copy + 1) * size))
        replicas = backend.subgroup(range(place, world, size))
    return Ranks(backend, shards, replicas, size, place)
