"""Which ranks are servers and workers, and the pairs that they talk in.

    ranks      0   1   2   3           pairs   (0, 2)  (0, 3)  (1, 2)  (1, 3)
    servers    0   1
    workers            2   3

Each pair is a group of its own, so that it breaks alone: who is lost breaks the groups that it is
in. Making one sends nothing, and does not need the others of the backend's group to be there.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.backends.base import Backend
from phalanx.backends.sub import SubBackend
from phalanx.errors import InvalidWorldSizeError, MisuseError


def checked_servers(servers: Sequence[int], backend: Backend, who: str) -> tuple[int, ...]:
    """The servers, in their order. InvalidRankError for one that is no rank; ValueError for twice
    the same; `InvalidWorldSizeError` for none.
    """
    listed = tuple(servers)
    if not listed:
        raise InvalidWorldSizeError(f"{who} needs at least one server", rank=backend.rank)
    for server in listed:
        backend.check_rank(server, "server")
    if len(set(listed)) < len(listed):
        raise ValueError(f"{who}: servers={listed} names a rank twice")
    return listed


def checked_workers(
    workers: Sequence[int] | None, servers: tuple[int, ...], backend: Backend, who: str
) -> tuple[int, ...]:
    """The workers, ascending: by default every rank that is no server."""
    if backend.rank not in servers:
        raise MisuseError(
            f"rank {backend.rank} calls {who} and is none of servers={servers}: workers call "
            "ParameterServer.connect",
            rank=backend.rank,
        )
    if workers is None:
        return tuple(rank for rank in range(backend.world_size) if rank not in servers)
    for worker in workers:
        backend.check_rank(worker, "worker")
        if worker in servers:
            raise ValueError(f"{who}: rank {worker} cannot be a server and a worker")
    return tuple(sorted(set(workers)))


def pair_of(backend: Backend, peer: int) -> SubBackend:
    """The group of this rank and another one. Both make it; no bytes are sent."""
    return backend.subgroup((backend.rank, peer))


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 2, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
