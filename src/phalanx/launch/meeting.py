"""How the ranks of a job learn where rank 0 listens.

    the launcher holds a store            no store
    ------------------------------        -----------------------------------------
    rank 0 listens on a free port,        rank 0 listens at MASTER_ADDR:MASTER_PORT,
    publishes address and token;          where the others know to find it; under
    the others wait for them              mpirun, without a port, MPI is the store

Keys carry the job and its restart, so that nobody meets a rank of a dead generation, and how many
times this rank has met before, so that a script may leave a world and enter a new one.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from phalanx.backends.tcp.address import listen_at
from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError
from phalanx.launch.address import ELSEWHERE, address_toward
from phalanx.launch.factories import MeetingPoint
from phalanx.launch.store import FIRST_PAUSE, LONGEST_PAUSE, Store, connect_store
from phalanx.wire.address import Endpoint

if TYPE_CHECKING:
    from phalanx.launch.environment import World

__all__ = ["find_meeting_point"]


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
        from phalanx.launch.mpi_word import word_of_rank_0  # noqa: PLC0415 - it imports torch

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
