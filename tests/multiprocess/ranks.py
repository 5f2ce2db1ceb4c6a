"""Ranks as processes of their own, each of which may end as it likes.

`phalanx.spawn` stops everyone when one rank fails, as users want; here the others are to be seen.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # for scripts that import this

from networks import Network, enter
from processes import fork_server

from phalanx import Backend, HybridBackend, SharedMemoryBackend, TcpBackend, broadcast_object
from phalanx.transport.backends import MeshBackend

PATIENCE = 200.0  # seconds for a rank to report before the test fails
PORT = 29500  # of rank 0 on a network of its own, where every port is free

KINDS: Mapping[str, type[Backend]] = MappingProxyType(
    {"tcp": TcpBackend, "shm": SharedMemoryBackend, "hybrid": HybridBackend}
)
VARIABLE = "PHALANX_TESTS_BACKEND"  # of the environment: the backend of jobs that ask for none


class Place(NamedTuple):
    """Where a rank is, and how it is connected; `host` is a network namespace, "" for this one."""

    rank: int
    world_size: int
    address: str
    token: str
    listener: socket.socket | None
    host: str
    timeout: float
    heartbeat: float | None
    kind: type[Backend]


class Job:
    """A job whose ranks are started one by one. Use it in a `with` statement.

    timeout, heartbeat   those of the backends
    network              each rank is on a host of its own there
    kind                 of backend: one whose ranks meet over TCP; else that which `VARIABLE` names
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 20.0,
        heartbeat: float | None = None,
        network: Network | None = None,
        kind: type[Backend] | None = None,
    ) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._heartbeat = heartbeat
        self._network = network
        self._kind = kind or KINDS[os.environ.get(VARIABLE, "tcp")]
        self._context = fork_server()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._started: list[tuple[BaseProcess, Connection]] = []
        self.processes: dict[int, int] = {}  # of the ranks, as the system knows them

    def start(
        self,
        rank: int,
        fn: Callable[..., Any],
        *args: Any,
        token: str = "the right token of the job",
    ) -> Callable[[], tuple[str, Any]]:
        """Start `fn(backend, *args)` as a rank. The result waits for its outcome.

        An outcome is ("returned", value), ("raised", text), or ("died", exit code).
        """
        ours, theirs = self._context.Pipe(duplex=False)
        args = (theirs, fn, self._place(rank, token), args)
        process = self._context.Process(target=_rank, args=args)
        process.start()
        theirs.close()
        assert process.pid is not None
        self.processes[rank] = process.pid
        self._started.append((process, ours))
        return lambda: _outcome(process, ours)

    def _place(self, rank: int, token: str) -> Place:
        if self._network is None:
            address = f"127.0.0.1:{self._listener.getsockname()[1]}"
            held, host = self._listener if rank == 0 else None, ""
        else:
            address = f"{self._network.address(0)}:{PORT}"
            held, host = None, self._network.host(rank)
        return Place(
            rank,
            self._world_size,
            address,
            token,
            held,
            host,
            self._timeout,
            self._heartbeat,
            self._kind,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for process, pipe in self._started:
            if process.is_alive():  # or its number may be another's: the fork server reaps it
                process.kill()
            process.join()
            pipe.close()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    kind: type[Backend] | None = None,
    timeout: float = 20.0,
) -> list[tuple[str, Any]]:
    """Run `fn(backend, *args)` on all ranks of a job; their outcomes."""
    with Job(world_size, kind=kind, timeout=timeout) as job:
        outcomes = [job.start(rank, fn, *args) for rank in range(world_size)]
        return [outcome() for outcome in outcomes]


def beside(backend: Backend, kind: type[MeshBackend]) -> MeshBackend:
    """Another backend of the same ranks, which have all called this: processes cost seconds."""
    listener = socket.create_server(("127.0.0.1", 0)) if backend.rank == 0 else None
    address = f"127.0.0.1:{listener.getsockname()[1]}" if listener else ""
    address = broadcast_object(address, backend)
    return kind(
        backend.rank,
        backend.world_size,
        address,
        token="the token of those beside",
        listener=listener,
    )


def _outcome(process: BaseProcess, pipe: Connection) -> tuple[str, Any]:
    if not pipe.poll(PATIENCE):
        return "silent", None
    try:
        outcome: tuple[str, Any] = pipe.recv()
    except EOFError:
        process.join(PATIENCE)
        return "died", process.exitcode
    return outcome


def _rank(pipe: Connection, fn: Callable[..., Any], place: Place, args: tuple[Any, ...]) -> None:
    backend: Backend | None = None
    try:
        if place.host:
            enter(place.host)
        backend = place.kind(  # type: ignore[call-arg]  # as those are made that meet over TCP
            place.rank,
            place.world_size,
            place.address,
            token=place.token,
            timeout=place.timeout,
            listener=place.listener,
            heartbeat=place.heartbeat,
        )
        pipe.send(("returned", fn(backend, *args)))
    except Exception as error:
        pipe.send(("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        if backend is not None:
            backend.close()
