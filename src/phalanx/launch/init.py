"""`init`: this process's place in its job, as a backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from phalanx.errors import BackendUnavailableError
from phalanx.launch.environment import read_environment
from phalanx.launch.rendezvous import RendezvousInfo, rendezvous

if TYPE_CHECKING:
    from phalanx.core.backend import Backend
    from phalanx.transport.backends import MeshBackend


def init(backend: str = "auto", *, timeout: float = 60.0) -> Backend:
    """Return the backend of this rank in the job that a launcher started.

    Reads what `phalanx run`, `torchrun`, `mpirun` or `srun` left in the environment; without a
    launcher it is a world of one, so that a script runs unchanged by hand. `timeout` (seconds)
    bounds the wait for the other ranks here, and is the default of every later call.

    `backend` is "tcp"; "shm", shared memory, for ranks on one host; "hybrid", shared memory inside
    a host and TCP between; "mpi", under `mpirun`; "gloo", "nccl" or "ucc", torch's; or "auto",
    which is shm on one host and hybrid on several, and falls back to TCP where memory cannot be
    shared. Another name raises `BackendUnavailableError`, as does a store of the launcher that
    cannot be reached. An environment that makes no sense raises what `read_environment` says.
    """
    factory = factory_named(backend)
    world = read_environment(os.environ)
    if world is None:
        return factory(RendezvousInfo(rank=0, world_size=1), timeout)
    if backend == "mpi":  # whose ranks find each other by themselves
        return factory(RendezvousInfo(world.rank, world.world_size), timeout)
    return factory(rendezvous(world, timeout=timeout), timeout)


# ------------------------------------------------------------------------------
# The backends that can be asked for by name, and how each is made from the outcome of a rendezvous.


Factory = Callable[[RendezvousInfo, float], "Backend"]


def factory_named(name: str) -> Factory:
    """Return what makes the backend `name`; `BackendUnavailableError` for a name without one.

    A world of one is the same for every name, and needs no network.
    """
    if name not in BACKENDS:
        raise BackendUnavailableError(
            f"there is no backend {name!r}; there are: {', '.join(sorted(BACKENDS))}"
        )
    factory = BACKENDS[name]
    return lambda info, timeout: (_alone if info.world_size == 1 else factory)(info, timeout)


def _alone(info: RendezvousInfo, timeout: float) -> Backend:
    from phalanx.transport.simulated import SimulatedBackend  # noqa: PLC0415

    if info.listener is not None:
        info.listener.close()
    return SimulatedBackend.create_group(1, timeout=timeout)[0]


def _mesh(name: str) -> Factory:
    """Shared memory, TCP, or both; "auto" is the best of them that can run here."""

    def make(info: RendezvousInfo, timeout: float) -> Backend:
        from phalanx.transport.backends import (  # noqa: PLC0415
            HybridBackend,
            SharedMemoryBackend,
            TcpBackend,
        )

        kinds: dict[str, type[MeshBackend]] = {
            "tcp": TcpBackend,
            "shm": SharedMemoryBackend,
            "hybrid": HybridBackend,
            "auto": SharedMemoryBackend if info.one_host else HybridBackend,
        }
        if info.listener is not None:
            info.listener.setblocking(False)  # the copy that another process inherits is blocking
        return kinds[name](
            info.rank,
            info.world_size,
            info.master_addr,
            token=info.token,
            timeout=timeout,
            job=info.job,
            generation=info.generation,
            listener=info.listener,
            fall_back=name == "auto",
        )

    return make


def _mpi(info: RendezvousInfo, timeout: float) -> Backend:
    from phalanx.native.mpi.backend import MpiBackend  # noqa: PLC0415

    backend = MpiBackend(timeout=timeout)
    if (backend.rank, backend.world_size) != (info.rank, info.world_size):
        backend.close()
        raise BackendUnavailableError(
            f"MPI says that this is rank {backend.rank} of {backend.world_size}, the launcher "
            f"rank {info.rank} of {info.world_size}: start the ranks with the mpirun that "
            "belongs to the MPI library of mpi4py",
            rank=info.rank,
        )
    return backend


def _process_group(name: str) -> Factory:
    """A process group of torch's that the backend makes itself."""

    def make(info: RendezvousInfo, timeout: float) -> Backend:
        from phalanx.native import torch_group  # noqa: PLC0415

        backends = {
            "gloo": torch_group.GlooBackend,
            "nccl": torch_group.NcclBackend,
            "ucc": torch_group.UccBackend,
        }
        return backends[name](
            info.rank,
            info.world_size,
            info.master_addr,
            timeout=timeout,
            job=info.job,
            generation=info.generation,
            listener=info.listener,
        )

    return make


BACKENDS: Mapping[str, Factory] = MappingProxyType(
    {
        **{name: _mesh(name) for name in ("auto", "tcp", "shm", "hybrid")},
        "mpi": _mpi,
        **{name: _process_group(name) for name in ("gloo", "nccl", "ucc")},
    }
)
"""Name -> factory."""
