"""`init`: this process's place in its job, as a backend."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError
from phalanx.launch.environment import ELSEWHERE, address_toward, read_environment
from phalanx.launch.store import FIRST_PAUSE, LONGEST_PAUSE, Store, connect_store
from phalanx.native.mpi.library import duplicate, wait_until
from phalanx.native.mpi.steps import import_mpi
from phalanx.transport.tcp.admission import listen_at
from phalanx.wire.control import Endpoint

if TYPE_CHECKING:
    from phalanx.core.backend import Backend
    from phalanx.launch.environment import World
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
        return factory(MeetingPoint(rank=0, world_size=1), timeout)
    if backend in MEET_BY_THEMSELVES:
        return factory(MeetingPoint(world.rank, world.world_size), timeout)
    return factory(find_meeting_point(world, timeout=timeout), timeout)


# ------------------------------------------------------------------------------
# The backends that can be asked for by name, and how each is made from a meeting point.


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
    from phalanx.transport.simulated import SimulatedBackend  # noqa: PLC0415

    if point.listener is not None:
        point.listener.close()
    return SimulatedBackend.create_group(1, timeout=timeout)[0]


def _tcp(point: MeetingPoint, timeout: float) -> Backend:
    from phalanx.transport.backends import TcpBackend  # noqa: PLC0415

    return _connected(TcpBackend, point, timeout)


def _shm(point: MeetingPoint, timeout: float) -> Backend:
    from phalanx.transport.backends import SharedMemoryBackend  # noqa: PLC0415

    return _connected(SharedMemoryBackend, point, timeout)


def _hybrid(point: MeetingPoint, timeout: float) -> Backend:
    from phalanx.transport.backends import HybridBackend  # noqa: PLC0415

    return _connected(HybridBackend, point, timeout)


def _auto(point: MeetingPoint, timeout: float) -> Backend:
    """Shared memory among the ranks of each host, where that can be; else TCP."""
    from phalanx.transport.backends import HybridBackend, SharedMemoryBackend  # noqa: PLC0415

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
    from phalanx.native.mpi.backend import MpiBackend  # noqa: PLC0415

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
        from phalanx.native import torch_group  # noqa: PLC0415

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


# ------------------------------------------------------------------------------
# How the ranks of a job learn where rank 0 listens.
#
#     the launcher holds a store            no store
#     ------------------------------        -----------------------------------------
#     rank 0 listens on a free port,        rank 0 listens at MASTER_ADDR:MASTER_PORT,
#     publishes address and token;          where the others know to find it; under
#     the others wait for them              mpirun, without a port, MPI is the store
#
# Keys carry the job and its restart, so that nobody meets a rank of a dead generation, and how many
# times this rank has met before, so that a script may leave a world and enter a new one.


def find_meeting_point(world: World, *, timeout: float) -> MeetingPoint:
    """Return where the ranks of `world` meet; blocks until rank 0 has said so, where it must.

    `CollectiveTimeoutError` when rank 0 says nothing in `timeout` seconds, and
    `BackendUnavailableError` when the launcher's store cannot be reached.
    """
    if world.world_size == 1:
        return MeetingPoint(world.rank, world.world_size)
    if not world.agent_store and not world.master_port:
        return _meet_over_mpi(world, timeout)
    if not world.agent_store:
        return MeetingPoint(
            world.rank,
            world.world_size,
            str(Endpoint(world.master_addr, world.master_port)),
            job=world.run_id,
            generation=world.restart_count,
            one_host=world.one_host,
        )
    deadline = time.monotonic() + timeout
    store = connect_store(world.master_addr, world.master_port, rank=world.rank, deadline=deadline)
    prefix = f"phalanx/{world.run_id}/{world.restart_count}"
    visit = store.add(f"{prefix}/visits/{world.rank}", 1)
    key = f"{prefix}/meeting/{visit}"
    if world.rank == 0:
        return _publish(store, key, world)
    address, _, token = _wait_for(store, key, world, deadline, timeout).partition(" ")
    return _point(world, address, token)


def _publish(store: Store, key: str, world: World) -> MeetingPoint:
    address, shared, listener = _listen(world, world.master_addr, world.master_port)
    store.set(key, f"{address} {shared}")
    return _point(world, address, shared or os.environ.get("PHALANX_TOKEN", ""), listener)


def _listen(world: World, toward: str, port: int) -> tuple[str, str, socket.socket]:
    """For rank 0: where it listens, a token for those who were given none, and the listener."""
    try:
        host = address_toward(toward, port, one_host=world.one_host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = listen_at(family, (host, 0))
    except OSError as error:
        raise BackendUnavailableError(
            f"rank 0 found no address at which other ranks reach it by way of "
            f"{toward!r} ({error}): is the name right, and the network up?",
            rank=0,
        ) from error
    address = str(Endpoint(host, listener.getsockname()[1]))
    # Whoever set a token gave it to every rank: the store, which anyone may ask, need not see it.
    given = os.environ.get("PHALANX_TOKEN") or os.environ.get("PHALANX_TOKEN_FILE")
    return address, "" if given else secrets.token_hex(32), listener


def _meet_over_mpi(world: World, timeout: float) -> MeetingPoint:
    """The launcher is an MPI's, and nobody has said where to meet."""
    listener = None
    word = ""
    if world.rank == 0:
        toward = (world.master_addr, 0) if world.master_addr else ELSEWHERE
        address, shared, listener = _listen(world, *toward)
        word = f"{address} {shared}"
    try:
        address, _, token = word_of_rank_0(word, timeout=timeout).partition(" ")
    except BaseException as error:
        if listener is not None:
            listener.close()
        if isinstance(error, BackendUnavailableError):
            raise BackendUnavailableError(
                f"MASTER_PORT is not set, and the {world.world_size} ranks of mpirun cannot meet "
                f"through MPI instead: {error}; or set MASTER_ADDR to the host of rank 0 and "
                "MASTER_PORT to a free port of it, the same for every rank",
                rank=world.rank,
            ) from error
        raise
    return _point(world, address, token or os.environ.get("PHALANX_TOKEN", ""), listener)


def _point(
    world: World, address: str, token: str, listener: socket.socket | None = None
) -> MeetingPoint:
    return MeetingPoint(
        world.rank,
        world.world_size,
        address,
        token=token or None,
        job=world.run_id,
        generation=world.restart_count,
        one_host=world.one_host,
        listener=listener,
    )


def _wait_for(store: Store, key: str, world: World, deadline: float, timeout: float) -> str:
    pause = FIRST_PAUSE
    # Asking again and again, because a wait inside the store hears no signal.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"rank {world.rank} waited {timeout:g} s for rank 0 to say where it listens "
                f"({key} in the launcher's store): has rank 0 called phalanx.init() as often as "
                f"this rank, and is every host at restart {world.restart_count}?",
                rank=world.rank,
                peer=0,
                op="init",
                seconds=timeout,
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return store.get(key).decode()


# ------------------------------------------------------------------------------
# A word of rank 0's to all ranks, by way of MPI: for ranks that have nowhere else to meet.

LONGEST = 512  # bytes


def word_of_rank_0(word: str, *, timeout: float) -> str:
    """What rank 0 has called this with; every rank that `mpirun` has started calls it, and blocks.

    Raises `CollectiveTimeoutError` after so many seconds, and `BackendUnavailableError` without
    mpi4py.
    """
    mpi = import_mpi()
    comm = duplicate(mpi.COMM_WORLD, timeout)
    block = bytearray(LONGEST)
    if comm.Get_rank() == 0:
        content = word.encode()
        block[: len(content)] = content
    if not wait_until(comm.Ibcast([block, LONGEST, mpi.BYTE], 0).Test, timeout):
        rank = comm.Get_rank()
        raise CollectiveTimeoutError(
            f"rank {rank} waited {timeout:g} s for MPI to bring the word of rank 0",
            rank=rank,
            peer=0,
            op="init",
            seconds=timeout,
        )
    comm.Free()
    return block.rstrip(b"\0").decode()
