"""How the ranks of a job learn where rank 0 listens.

    the launcher holds a store            no store
    ------------------------------        -----------------------------------------
    rank 0 listens on a free port,        rank 0 listens at MASTER_ADDR:MASTER_PORT,
    publishes address and token;          where the others know to find it; under
    the others wait for them              mpirun, without a port, MPI broadcasts them

Keys of the store carry the job and its restart, so that nobody finds a rank of a dead generation,
and how many rendezvous this rank has been at, so that a script may leave a world and enter another.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, field

from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError
from phalanx.launch.environment import ELSEWHERE, World, address_toward
from phalanx.launch.store import FIRST_PAUSE, LONGEST_PAUSE, connect_store
from phalanx.native.mpi.library import duplicate, wait_until
from phalanx.native.mpi.steps import import_mpi
from phalanx.transport.tcp.admission import listen_at
from phalanx.wire.control import Endpoint


@dataclass(frozen=True)
class RendezvousInfo:
    """Where rank 0 of a job listens, and what shows that a rank belongs to the job."""

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


def rendezvous(world: World, *, timeout: float) -> RendezvousInfo:
    """Return where rank 0 of `world` listens; blocks until rank 0 has published it, if it must.

    `CollectiveTimeoutError` when rank 0 says nothing in `timeout` seconds, and
    `BackendUnavailableError` when the launcher's store cannot be reached.
    """
    if world.world_size == 1:
        return RendezvousInfo(world.rank, world.world_size)
    if world.agent_store:
        return _rendezvous_at_store(world, timeout)
    if world.master_port:
        return _info(world, str(Endpoint(world.master_addr, world.master_port)), None)
    return _rendezvous_over_mpi(world, timeout)


def _rendezvous_at_store(world: World, timeout: float) -> RendezvousInfo:
    deadline = time.monotonic() + timeout
    store = connect_store(world.master_addr, world.master_port, rank=world.rank, deadline=deadline)
    prefix = f"phalanx/{world.run_id}/{world.restart_count}"
    count = store.add(f"{prefix}/count/{world.rank}", 1)
    key = f"{prefix}/rendezvous/{count}"
    if world.rank == 0:
        address, token, listener = _listen(world, world.master_addr, world.master_port)
        store.set(key, f"{address} {token}")
        return _info(world, address, token or _given_token(), listener)
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
    address, _, token = store.get(key).decode().partition(" ")
    return _info(world, address, token)


def _rendezvous_over_mpi(world: World, timeout: float) -> RendezvousInfo:
    """Without a store and a port: MPI, whose ranks these are, broadcasts what rank 0 has to say."""
    listener = None
    message = ""
    if world.rank == 0:
        toward = (world.master_addr, 0) if world.master_addr else ELSEWHERE
        address, token, listener = _listen(world, *toward)
        message = f"{address} {token}"
    try:
        message = broadcast_over_mpi(message, timeout=timeout)
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
    address, _, token = message.partition(" ")
    return _info(world, address, token or _given_token(), listener)


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


def _given_token() -> str:
    return os.environ.get("PHALANX_TOKEN", "")


def _info(
    world: World, address: str, token: str | None, listener: socket.socket | None = None
) -> RendezvousInfo:
    return RendezvousInfo(
        world.rank,
        world.world_size,
        address,
        token=token or None,
        job=world.run_id,
        generation=world.restart_count,
        one_host=world.one_host,
        listener=listener,
    )


_LONGEST = 512  # bytes


def broadcast_over_mpi(message: str, *, timeout: float) -> str:
    """Return rank 0's `message`; every rank that `mpirun` has started calls it, and blocks.

    Raises `CollectiveTimeoutError` after so many seconds, and `BackendUnavailableError` without
    mpi4py.
    """
    mpi = import_mpi()
    comm = duplicate(mpi.COMM_WORLD, timeout)
    block = bytearray(_LONGEST)
    if comm.Get_rank() == 0:
        content = message.encode()
        block[: len(content)] = content
    if not wait_until(comm.Ibcast([block, _LONGEST, mpi.BYTE], 0).Test, timeout):
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
