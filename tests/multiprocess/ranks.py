"""Ranks as processes of their own, each of which may end as it likes.

`phalanx.spawn` stops everyone when one rank fails, as users want; here the others are to be seen.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from phalanx import Backend, TcpBackend

PATIENCE = 60.0  # seconds for a rank to report before the test fails


class Job:
    """A job whose ranks are started one by one. Use it in a `with` statement."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["phalanx"])  # torch is imported once, not n times
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._started: list[tuple[BaseProcess, Connection]] = []

    def start(
        self, rank: int, fn: Callable[..., Any], *args: Any, token: str = "the right token"
    ) -> Callable[[], tuple[str, Any]]:
        """Start `fn(backend, *args)` as a rank. The result waits for its outcome.

        An outcome is ("returned", value), ("raised", text), or ("died", exit code).
        """
        port = self._listener.getsockname()[1]
        held = self._listener if rank == 0 else None
        ours, theirs = self._context.Pipe(duplex=False)
        place = (rank, self._world_size, f"127.0.0.1:{port}", token, held)
        process = self._context.Process(target=_rank, args=(theirs, fn, place, args))
        process.start()
        theirs.close()
        self._started.append((process, ours))
        return lambda: _outcome(process, ours)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for process, pipe in self._started:
            process.kill()
            process.join()
            pipe.close()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[tuple[str, Any]]:
    """Run `fn(backend, *args)` on all ranks of a job; their outcomes."""
    with Job(world_size) as job:
        outcomes = [job.start(rank, fn, *args) for rank in range(world_size)]
        return [outcome() for outcome in outcomes]


def _outcome(process: BaseProcess, pipe: Connection) -> tuple[str, Any]:
    if not pipe.poll(PATIENCE):
        return "silent", None
    try:
        outcome: tuple[str, Any] = pipe.recv()
    except EOFError:
        process.join(PATIENCE)
        return "died", process.exitcode
    return outcome


def _rank(
    pipe: Connection,
    fn: Callable[..., Any],
    place: tuple[int, int, str, str, socket.socket | None],
    args: tuple[Any, ...],
) -> None:
    rank, world_size, address, token, listener = place
    backend: Backend | None = None
    try:
        backend = TcpBackend(
            rank, world_size, address, token=token, timeout=20.0, listener=listener
        )
        pipe.send(("returned", fn(backend, *args)))
    except Exception as error:
        pipe.send(("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        if backend is not None:
            backend.close()
