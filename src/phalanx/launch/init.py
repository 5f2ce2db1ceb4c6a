"""`init`: this process's place in its job, as a backend.

The ways in which the ranks of a job learn rank 0's address:

    the launcher holds a store            no store
    ------------------------------        -----------------------------------------
    `phalanx run`: ours, behind a         rank 0 listens at MASTER_ADDR:MASTER_PORT,
    door (store.py); torchrun: torch's.   where the others look for it; under
    There all ranks say that they are     mpirun, without a port, MPI broadcasts that;
    here, and rank 0 its address          under srun a file brings the token (slurm.py)
    (native/store_rendezvous.py)

A token comes from the environment. If there is none, it may come with rank 0's address: from MPI,
or from torch's store with PHALANX_TRUST_STORE=1.

"auto" is NCCL if each rank has a GPU of its own: each rank tells rank 0, which tells all.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.recorder import LOG_VARIABLE
from phalanx.errors import AuthenticationError, BackendUnavailableError, CollectiveTimeoutError
from phalanx.hooks import begin_observers, check_observers
from phalanx.launch import slurm
from phalanx.launch.environment import World, read_environment
from phalanx.launch.store import connect_store
from phalanx.native.mpi import duplicate, import_mpi
from phalanx.native.mpi_library import wait_until
from phalanx.native.store_rendezvous import (
    Entries,
    RendezvousResult,
    StoreRendezvous,
    Trust,
    connect_torchs_store,
    rendezvous_by,
    route_by,
    trust_in_torchs_store,
)
from phalanx.transport import backends
from phalanx.transport.backends import MeshBackend
from phalanx.transport.tcp.addresses import address_toward, resolve
from phalanx.transport.tcp.admission import find_token
from phalanx.wire.control import Endpoint

if TYPE_CHECKING:
    from phalanx.core.backend import Backend

log = logging.getLogger("phalanx")


def init(backend: str = "auto", *, timeout: float = DEFAULT_TIMEOUT) -> Backend:
    """Return the backend of this rank in the job that a launcher started.

    Reads the variables of `phalanx run`, `torchrun`, `mpirun` or `srun`; without a launcher it is a
    world of one, so that a script runs unchanged by hand. `timeout` (seconds) bounds the wait for
    the other ranks here, and is the default of every later call.

    `backend` is "tcp"; "shm", shared memory, for ranks on one host; "hybrid", shared memory inside
    a host and TCP between; "mpi", under `mpirun`; "gloo", "nccl" or "ucc", torch's; or "auto".
    "auto" is nccl if the launcher holds a store (`phalanx run`, `torchrun`) and each rank has a GPU
    of its own. That is number LOCAL_RANK, which becomes its current one. Else it is shm on one host
    and hybrid on several, or TCP if memory cannot be shared. Another name raises
    `BackendUnavailableError`, as does a store of the launcher that cannot be reached. An impossible
    environment raises the errors of `read_environment`.
    """
    check_name(backend)
    check_observers(os.environ)
    world = read_environment(os.environ) or World(rank=0, world_size=1)
    if world.source == "slurm":
        slurm.die_with_step(os.environ)
    if backend != "mpi":  # whose ranks find each other by themselves
        own_gpu = backend == "auto" and world.agent_store and not why_not_nccl(world.local_rank)
        world = rendezvous(world, timeout=timeout, own_gpu=own_gpu)
    made = make_backend(backend, world, timeout)
    begin_observers(made, None, os.environ)
    announce(made)
    return made


def announce(backend: Backend) -> None:
    """On rank 0 of a job, log its ranks and their connection in one line (INFO).

    If the program keeps no log, and PHALANX_LOG is not set, it goes to stderr.
    """
    if backend.rank or not isinstance(backend, MeshBackend) or backend.world_size == 1:
        return
    line = backend.describe()
    log.info("%s", line)
    if not os.environ.get(LOG_VARIABLE) and not log.hasHandlers():
        sys.stderr.write(f"phalanx: {line}\n")


# ------------------------------------------------------------------------------
# The rendezvous.


def why_not_nccl(local_rank: int) -> str:
    """Return why this rank has no GPU of its own for NCCL; "" if it has one."""
    import torch  # noqa: PLC0415

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "this build of torch has no NCCL"
    count = torch.cuda.device_count()
    return "" if local_rank < count else f"there are {count} GPUs, and none for rank {local_rank}"


def rendezvous(world: World, *, timeout: float, own_gpu: bool = False) -> World:
    """Return `world` with rank 0's address; block until all ranks have come.

    own_gpu   whether this rank would use NCCL, if all others do; ignored without a store

    `CollectiveTimeoutError` when ranks do not come in `timeout` seconds, and
    `BackendUnavailableError` when the launcher's store cannot be reached. `AuthenticationError` if
    that is torch's, and the ranks are on several hosts and have no token.
    """
    if world.world_size == 1:
        return world
    if world.agent_store:
        met = _rendezvous_at_store(world, timeout, own_gpu)
    elif world.master_port:
        endpoint = Endpoint(world.master_addr, world.master_port)
        if world.source == "slurm" and not world.one_host:
            slurm.check_first_node(os.environ, world.rank, endpoint)
            if world.rank == 0:  # to which its own name may mean loopback
                endpoint = endpoint._replace(host=address_toward(*endpoint, one_host=False))
        met = RendezvousResult(str(endpoint))
    else:
        met = _rendezvous_over_mpi(world, timeout)
    address, token, listener, gpu = met
    return replace(world, address=address, token=token, listener=listener, nccl=gpu)


def _rendezvous_at_store(world: World, timeout: float, own_gpu: bool) -> RendezvousResult:
    deadline = time.monotonic() + timeout
    endpoint = Endpoint(world.master_addr, world.master_port)
    trust: Trust = "door" if world.own_store else trust_in_torchs_store()
    try:
        store = (
            connect_store(endpoint, find_token(), deadline, job=world.run_id)
            if world.own_store
            else connect_torchs_store(endpoint, deadline)
        )
    except (OSError, RuntimeError) as error:
        if isinstance(error, AuthenticationError):
            raise AuthenticationError(f"rank {world.rank}: {error}", rank=world.rank) from error
        resolve(endpoint)  # which says it, if that is why
        raise BackendUnavailableError(
            f"rank {world.rank} cannot reach the launcher's store at {endpoint} ({error}): is the "
            "launcher running, and may this host connect to it?",
            rank=world.rank,
        ) from error
    entries = Entries(store, (world.run_id, world.restart_count, "init"), trust)
    part = StoreRendezvous(entries, world.rank, world.world_size, timeout, "init", gpu=own_gpu)
    part.deadline = deadline
    try:
        return part.run(endpoint)
    finally:
        if world.own_store:
            store.close()


def _rendezvous_over_mpi(world: World, timeout: float) -> RendezvousResult:
    """Without a store and a port: let MPI, which started the ranks, broadcast rank 0's address."""
    try:
        mpi = import_mpi()
    except BackendUnavailableError as error:
        raise BackendUnavailableError(
            f"MASTER_PORT is not set, and the {world.world_size} ranks of mpirun cannot meet "
            f"through MPI instead: {error}; or set MASTER_ADDR to the host of rank 0 and "
            "MASTER_PORT to a free port of it, the same for every rank",
            rank=world.rank,
        ) from error

    def broadcast(block: bytearray) -> None:
        comm = duplicate(mpi.COMM_WORLD, timeout)
        if not wait_until(comm.Ibcast([block, len(block), mpi.BYTE], 0).Test, timeout):
            raise CollectiveTimeoutError(
                f"rank {world.rank} waited {timeout:g} s for MPI to bring the word of rank 0",
                rank=world.rank,
                peer=0,
                op="init",
                seconds=timeout,
            )
        comm.Free()

    return rendezvous_by(
        broadcast, world.rank, route_by(world.master_addr), one_host=world.one_host
    )


# ------------------------------------------------------------------------------
# The backends that can be asked for by name, and how each is made from the outcome of a rendezvous.


def check_name(name: str) -> None:
    """Raise `BackendUnavailableError` unless `name` is one of the `BACKENDS`."""
    if name not in BACKENDS:
        raise BackendUnavailableError(
            f"there is no backend {name!r}; there are: {', '.join(sorted(BACKENDS))}"
        )


def make_backend(name: str, world: World, timeout: float) -> Backend:
    """Return the backend `name`; a world of one is the same for all, without a network."""
    if world.world_size > 1:
        return BACKENDS[name](world, timeout)
    from phalanx.transport.simulated import SimulatedBackend  # noqa: PLC0415

    if world.listener is not None:
        world.listener.close()
    return SimulatedBackend.create_group(1, timeout=timeout)[0]


def _mesh(name: str, world: World, timeout: float) -> Backend:
    """Return shared memory, TCP, or both; for "auto" the best of them that can run here."""
    kinds: dict[str, type[MeshBackend]] = {
        "tcp": backends.TcpBackend,
        "shm": backends.SharedMemoryBackend,
        "hybrid": backends.HybridBackend,
        "auto": backends.SharedMemoryBackend if world.one_host else backends.HybridBackend,
    }
    if world.listener is not None:
        world.listener.setblocking(False)  # the copy that another process inherits is blocking
    token: AbstractContextManager[None] = nullcontext()
    if world.source == "slurm":
        token = slurm.shared_token(os.environ, world.rank, one_host=world.one_host, timeout=timeout)
    with token:
        return _make(kinds[name], world, timeout, token=world.token, fall_back=name == "auto")


def _auto(world: World, timeout: float) -> Backend:
    """Return NCCL if the ranks have GPUs of their own, else the best mesh that can run here."""
    if not world.nccl:
        return _mesh("auto", world, timeout)
    import torch  # noqa: PLC0415

    torch.cuda.set_device(world.local_rank)
    return _process_group("nccl", world, timeout)


def _mpi(world: World, timeout: float) -> Backend:
    from phalanx.native.mpi import MpiBackend  # noqa: PLC0415

    backend = MpiBackend(timeout=timeout)
    if (backend.rank, backend.world_size) != (world.rank, world.world_size):
        backend.close()
        raise BackendUnavailableError(
            f"MPI says that this is rank {backend.rank} of {backend.world_size}, the launcher "
            f"rank {world.rank} of {world.world_size}: for the backend 'mpi' start the ranks with "
            f"mpirun -n {world.world_size} python SCRIPT, the mpirun of mpi4py's MPI library",
            rank=world.rank,
        )
    return backend


def _process_group(name: str, world: World, timeout: float) -> Backend:
    """Return a process group of torch's that the backend makes itself."""
    from phalanx.native import torch_group  # noqa: PLC0415

    kinds = {
        "gloo": torch_group.GlooBackend,
        "nccl": torch_group.NcclBackend,
        "ucc": torch_group.UccBackend,
    }
    return _make(kinds[name], world, timeout)


def _make(kind: Callable[..., Backend], world: World, timeout: float, **options: Any) -> Backend:
    return kind(
        world.rank,
        world.world_size,
        world.address,
        timeout=timeout,
        job=world.run_id,
        generation=world.restart_count,
        listener=world.listener,
        **options,
    )


BACKENDS: Mapping[str, Callable[[World, float], Backend]] = MappingProxyType(
    {
        "auto": _auto,
        **{name: partial(_mesh, name) for name in ("tcp", "shm", "hybrid")},
        "mpi": _mpi,
        **{name: partial(_process_group, name) for name in ("gloo", "nccl", "ucc")},
    }
)
"""Name -> what makes the backend."""
