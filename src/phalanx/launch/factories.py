"""The backends that can be asked for by name, and how each is made from a meeting point."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from phalanx.errors import BackendUnavailableError

if TYPE_CHECKING:
    from phalanx.backends.base import Backend
    from phalanx.backends.tcp.mesh_backend import MeshBackend

__all__ = ["BACKENDS", "MEET_BY_THEMSELVES", "Factory", "MeetingPoint", "factory_named"]


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks of one job meet, and what shows that a rank belongs to it."""

    rank: int
    world_size: int
    master_addr: str = ""
    token: str | None = field(default=None, repr=False)
    job: str = ""
    generation: int = 0
    one_host: bool = False
    """Whether the launcher says that all ranks are on this host."""
    listener: socket.socket | None = None
    """Rank 0's, already listening at `master_addr`; None: the backend listens there itself."""


Factory = Callable[[MeetingPoint, float], "Backend"]


def factory_named(name: str) -> Factory:
    """Return what makes the backend `name`; `BackendUnavailableError` for a name without one.

    A world of one is the same for every name, and needs no network.
    """
    if name not in BACKENDS:
        raise BackendUnavailableError(
            f"there is no backend {name!r}; there are: {', '.join(sorted(BACKENDS))}"
        )
    factory = BACKENDS[name]
    return lambda point, timeout: (_alone if point.world_size == 1 else factory)(point, timeout)


def _alone(point: MeetingPoint, timeout: float) -> Backend:
    from phalanx.backends.simulated import SimulatedBackend  # noqa: PLC0415

    if point.listener is not None:
        point.listener.close()
    return SimulatedBackend.create_group(1, timeout=timeout)[0]


def _tcp(point: MeetingPoint, timeout: float) -> Backend:
    from phalanx.backends.tcp import TcpBackend  # noqa: PLC0415

    return _connected(TcpBackend, point, timeout)


def _shm(point: MeetingPoint, timeout: float) -> Backend:
    from phalanx.backends.shm.backend import SharedMemoryBackend  # noqa: PLC0415

    return _connected(SharedMemoryBackend, point, timeout)


def _hybrid(point: MeetingPoint, timeout: float) -> Backend:
    from phalanx.backends.shm.backend import HybridBackend  # noqa: PLC0415

    return _connected(HybridBackend, point, timeout)


def _auto(point: MeetingPoint, timeout: float) -> Backend:
    """Shared memory among the ranks of each host, where that can be; else TCP."""
    from phalanx.backends.shm.backend import HybridBackend, SharedMemoryBackend  # noqa: PLC0415

    kind = SharedMemoryBackend if point.one_host else HybridBackend
    return _connected(kind, point, timeout, fall_back=True)


def _connected(
    kind: type[MeshBackend], point: MeetingPoint, timeout: float, *, fall_back: bool = False
) -> Backend:
    if point.listener is not None:
        point.listener.setblocking(False)  # a socket that came through a pipe forgets that
    return kind(
        point.rank,
        point.world_size,
        point.master_addr,
        token=point.token,
        timeout=timeout,
        job=point.job,
        generation=point.generation,
        listener=point.listener,
        fall_back=fall_back,
    )


def _mpi(point: MeetingPoint, timeout: float) -> Backend:
    from phalanx.backends.mpi import MpiBackend  # noqa: PLC0415

    backend = MpiBackend(timeout=timeout)
    if (backend.rank, backend.world_size) != (point.rank, point.world_size):
        backend.close()
        raise BackendUnavailableError(
            f"MPI says that this is rank {backend.rank} of {backend.world_size}, the launcher "
            f"rank {point.rank} of {point.world_size}: start the ranks with the mpirun that "
            "belongs to the MPI library of mpi4py",
            rank=point.rank,
        )
    return backend


def _process_group(name: str) -> Factory:
    """A process group of torch's that the backend makes itself."""

    def make(point: MeetingPoint, timeout: float) -> Backend:
        from phalanx.backends import torch_group  # noqa: PLC0415

        backends = {
            "gloo": torch_group.GlooBackend,
            "nccl": torch_group.NcclBackend,
            "ucc": torch_group.UccBackend,
        }
        return backends[name](
            point.rank,
            point.world_size,
            point.master_addr,
            timeout=timeout,
            job=point.job,
            generation=point.generation,
            listener=point.listener,
        )

    return make


BACKENDS: Mapping[str, Factory] = MappingProxyType(
    {
        "auto": _auto,
        "tcp": _tcp,
        "shm": _shm,
        "hybrid": _hybrid,
        "mpi": _mpi,
        **{name: _process_group(name) for name in ("gloo", "nccl", "ucc")},
    }
)
"""Name -> factory. `auto` is the best of those that can run here."""

MEET_BY_THEMSELVES = frozenset({"mpi"})
"""Backends whose ranks find each other without a meeting point."""
