"""The cluster "mpi": every rank is a process that mpirun has started, and runs the same tests.

    mpirun -n 4 python tests/mpi_ranks.py tests/backends/test_conformance_messages.py ...

All processes come to the same `cluster.run(fn, n)`. The first n of them run `fn`; then all tell
each other what came of it, over a communicator of the tests' own, and so go on in the same way.
"""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
from clusters import LIBRARYS_OWN, PATIENCE, TIMEOUT, Cluster, RankFunction, first_cause
from together import note
from waiting import wait_until

from phalanx import Backend, MpiBackend

T = TypeVar("T")

SIGNALS = (threading.Event, threading.Barrier, threading.Semaphore, type(threading.Lock()))
PAUSE = 0.0005  # seconds: a rank that has nothing to do leaves its core to the others


class Mpi(Cluster):
    """`MpiBackend`, under mpirun."""

    name = "mpi"
    lacks = MappingProxyType(
        {
            **LIBRARYS_OWN,
            "mismatches": "MPI completes different collectives that meet, with wrong numbers",
            "one process": "ranks are processes: what one logs is not seen by another",
        }
    )

    kind: type[MpiBackend] = MpiBackend

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD.Dup()
        self._parts = {size: self._first(size) for size in range(1, self._world.size + 1)}

    def run(self, fn: RankFunction[T], size: int, *, timeout: float = TIMEOUT) -> list[T]:
        for name, what in _shared(fn):
            pytest.skip(f"{fn.__name__} shares {name} ({what}) with ranks in other processes")
        if size not in self._parts:
            pytest.skip(f"takes {size} ranks; mpirun has started {self._world.size}")
        part = self._parts[size]
        outcome: tuple[T | None, BaseException | None] = None, None
        if part != self._mpi.COMM_NULL:
            outcome = self._be_a_rank(fn, part, timeout)
        outcomes = self._told(outcome)[:size]
        if None in outcomes:
            pytest.skip(f"{fn.__name__} returns what cannot be sent to another process")
        failures = [error for _, error in outcomes if error is not None]
        if failures:
            raise first_cause(failures)
        return [result for result, _ in outcomes]

    def _first(self, size: int) -> Any:
        """The communicator of the first `size` ranks."""
        return self._world.Split(0 if self._world.rank < size else self._mpi.UNDEFINED)

    def _be_a_rank(
        self, fn: RankFunction[T], part: Any, timeout: float
    ) -> tuple[T | None, BaseException | None]:
        backend: Backend | None = None
        result: T | None = None
        failure: BaseException | None = None
        try:
            backend = self.kind(part, timeout=timeout)
            backend.engine.ask_every = Cluster.ask_every
            result = fn(backend)
        except BaseException as error:
            note(error, f"raised on rank {part.rank} of {part.size} ({self.name})")
            failure = error
            if backend is not None:
                backend.abort()
        self._meet(part)
        if backend is not None:
            backend.close()
        return result, failure

    def _meet(self, comm: Any) -> None:
        """Wait until all have come, without taking the core from those who have not."""
        request = comm.Ibarrier()
        try:
            wait_until(request.Test, "the others come", patience=PATIENCE, pause=PAUSE)
        except AssertionError as error:
            print(f"rank {comm.rank} {error}", flush=True)
            comm.Abort(1)

    def _told(self, outcome: Any) -> list[Any]:
        """The outcomes of all ranks."""
        self._meet(self._world)
        return [pickle.loads(each) for each in self._world.allgather(_portable(*outcome))]


def _shared(fn: Callable[..., object]) -> Iterator[tuple[str, str]]:
    """What a rank's function shares with other ranks of one process, by name and type.

    Those are signals between threads, and containers that are empty when the ranks begin.
    """
    captured = inspect.getclosurevars(fn).nonlocals if inspect.isfunction(fn) else {}
    for name, value in captured.items():
        if _is_to_be_filled(value):
            yield name, type(value).__name__
        elif inspect.isfunction(value) and value is not fn:
            yield from _shared(value)


def _is_to_be_filled(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_to_be_filled, value.values()))
    return isinstance(value, SIGNALS) or (
        isinstance(value, (list, set)) and all(map(_is_to_be_filled, value))
    )


def _portable(result: Any, failure: BaseException | None) -> bytes:
    """An outcome as bytes; None, if it is a result that cannot be sent."""
    try:
        content = pickle.dumps((result, failure))
        pickle.loads(content)
    except Exception:
        if failure is None:
            return pickle.dumps(None)
        return pickle.dumps((None, AssertionError(f"{type(failure)}: {failure}")))
    return content
