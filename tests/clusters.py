"""Clusters: the ways to run a function on every rank of a group, inside this process.

    cluster.run(fn, 3)  ->  [fn(backend of rank 0), fn(backend of rank 1), fn(backend of rank 2)]

If ranks fail, the error that came first is raised, and not one that follows from it; a note on it
names the rank. A rank that hangs is named too, with the line where it hangs. Backends stay open
until the last rank has returned, and are closed then; that of a rank that fails is aborted at once.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, TypeVar

import pytest
import torch
from together import note

import phalanx
from phalanx import (
    Backend,
    GlooBackend,
    HybridBackend,
    RankStopped,
    SharedMemoryBackend,
    SimulatedBackend,
    SubBackend,
    TcpBackend,
)
from phalanx.core.engine import ASK_EVERY
from phalanx.transport.backends import MeshBackend
from phalanx.transport.shm.cross_memory import ProcessMemory

T = TypeVar("T")
RankFunction = Callable[[Backend], T]
Maker = Callable[[], Backend]

TIMEOUT = 20.0  # of the backends: whoever waits in vain says so
DEBUGGED = "--pdb" in sys.argv  # by someone who may stop at a `breakpoint()` in a rank
PATIENCE = 1e6 if DEBUGGED else 3 * TIMEOUT  # of the test: what hangs for longer is stuck
TOKEN = "the token of the tests"


class Cluster(ABC):
    """One way to connect ranks."""

    name: str
    ask_every: ClassVar[float] = ASK_EVERY  # of the engines; see there
    keeps_time = True  # False: nothing takes time, so no timeout passes and a deadlock is an error
    speaks_tcp = False
    lacks: Mapping[str, str] = MappingProxyType({})  # what it does not promise, and why
    """Tests that are marked `requires` one of these are not run on it."""

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def run(self, fn: RankFunction[T], size: int, *, timeout: float = TIMEOUT) -> list[T]:
        """Run `fn(backend)` on `size` ranks; the results in rank order."""


NOTHING_IN_COMMON = MappingProxyType({"memory": "its ranks have none in common"})
LIBRARYS_OWN = MappingProxyType(
    {
        "agreement": "collectives of the library's own run whatever the other ranks call",
    }
)


class Cooperative(Cluster):
    """`phalanx.simulate`: one rank at a time."""

    name = "cooperative"
    keeps_time = False

    def run(self, fn: RankFunction[T], size: int, *, timeout: float = TIMEOUT) -> list[T]:
        def named(backend: Backend) -> T:
            try:
                return fn(backend)
            except Exception as error:
                note(error, f"raised on rank {backend.rank} of {size} ({self.name})")
                raise

        results: list[T] = []
        failures: list[BaseException] = []

        def simulate() -> None:
            try:
                results.extend(phalanx.simulate(named, size, timeout=timeout))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=simulate, name="simulate", daemon=True)
        thread.start()
        thread.join(PATIENCE)
        if thread.is_alive():
            raise AssertionError("simulate() hangs:\n" + _where(thread))
        if failures:
            raise failures[0]
        return results


class Threads(Cluster):
    """Ranks are threads that run freely."""

    @abstractmethod
    def makers(self, size: int, timeout: float) -> list[Maker]:
        """For each rank of the world, what makes its backend; called in that rank's thread."""

    def place(self, world: Backend, size: int) -> tuple[Backend, bool]:
        """This rank's backend, and whether it is one of the `size` ranks under test."""
        return world, True

    def run(self, fn: RankFunction[T], size: int, *, timeout: float = TIMEOUT) -> list[T]:
        results: dict[int, T] = {}
        failures: list[BaseException] = []
        everybody_ended = threading.Event()
        ended = threading.Semaphore(0)

        def be_a_rank(make: Maker) -> None:
            world: Backend | None = None
            try:
                world = make()
                world.engine.ask_every = Cluster.ask_every
                backend, under_test = self.place(world, size)
                if under_test:
                    results[backend.rank] = fn(backend)
                else:
                    keep_busy(backend)
            except BaseException as error:
                note(error, f"raised by {threading.current_thread().name} ({self.name})")
                failures.append(error)
                end(world, "abort")
            ended.release()
            everybody_ended.wait(PATIENCE)
            end(world, "close")

        def end(world: Backend | None, how: str) -> None:
            try:
                if world is not None:
                    getattr(world, how)()
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=be_a_rank, args=(make,), name=f"rank {n}", daemon=True)
            for n, make in enumerate(self.makers(size, timeout))
        ]
        for thread in threads:
            thread.start()
        all_came = all(ended.acquire(timeout=PATIENCE) for _ in threads)
        hanging = "" if all_came else "\n".join(map(_where, threads))
        everybody_ended.set()
        for thread in threads:
            thread.join(PATIENCE if all_came else 0.1)
        if hanging:
            raise AssertionError(f"ranks hang ({self.name}); where each is:\n{hanging}")
        if failures:
            raise first_cause(failures)
        stuck = [thread for thread in threads if thread.is_alive()]
        assert not stuck, "close() hangs:\n" + "\n".join(map(_where, stuck))
        return [results[rank] for rank in range(size)]


class Simulated(Threads):
    """`SimulatedBackend.create_group`."""

    name = "simulated"

    def makers(self, size: int, timeout: float) -> list[Maker]:
        group = SimulatedBackend.create_group(size, timeout=timeout)
        return [lambda backend=backend: backend for backend in group]  # type: ignore[misc]


class Tcp(Threads):
    """`TcpBackend` over real sockets of this host."""

    name = "tcp"
    speaks_tcp = True
    lacks = NOTHING_IN_COMMON
    kind: type[MeshBackend] = TcpBackend

    def host(self, rank: int) -> str:
        """What the host of a rank counts as."""
        return ""

    def makers(self, size: int, timeout: float) -> list[Maker]:
        listener = loopback_listener()
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def maker(rank: int) -> Maker:
            return lambda: self.kind(
                rank,
                size,
                address,
                token=TOKEN,
                timeout=timeout,
                listener=listener if rank == 0 else None,
                host=self.host(rank),
            )

        return [maker(rank) for rank in range(size)]


class WideBackend(TcpBackend):
    """Connected as in a wide mesh, however few ranks there are: of 4 and more, in a ring."""

    each_with_each = 1


class WideSharedMemoryBackend(SharedMemoryBackend):
    """The same with memory in common."""

    each_with_each = 1


class Wide(Tcp):
    """`TcpBackend` as it is among many ranks: with a connection to a few, until it needs others."""

    name = "wide"
    kind = WideBackend


class SharedMemory(Tcp):
    """`SharedMemoryBackend`: ranks of this host that have memory in common."""

    name = "shm"
    lacks: Mapping[str, str] = MappingProxyType({})
    kind = SharedMemoryBackend


def can_read() -> bool:
    """Whether the kernel has `process_vm_readv`, and lets a process read its own memory."""
    one, other = ctypes.c_uint64(7), ctypes.c_uint64()
    try:
        ProcessMemory(os.getpid()).read(ctypes.addressof(other), ctypes.addressof(one), 8)
    except OSError:
        return False
    return other.value == 7


needs_reading = pytest.mark.skipif(not can_read(), reason="the kernel has no process_vm_readv here")


class Hybrid(Tcp):
    """`HybridBackend`, on two hosts: ranks with even numbers, and those with odd ones."""

    name = "hybrid"
    kind = HybridBackend

    def host(self, rank: int) -> str:
        return "even" if rank % 2 == 0 else "odd"


class Gloo(Threads):
    """`GlooBackend`: torch's Gloo, with its own collectives."""

    name = "gloo"
    lacks = MappingProxyType(
        {**LIBRARYS_OWN, "descriptors": "the garbage collector frees the library's group"}
    )

    def makers(self, size: int, timeout: float) -> list[Maker]:
        listener = loopback_listener()
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def maker(rank: int) -> Maker:
            return lambda: GlooBackend(
                rank, size, address, timeout=timeout, listener=listener if rank == 0 else None
            )

        return [maker(rank) for rank in range(size)]


class SubOf(Threads):
    """A subgroup of a group with two more ranks, which are busy with something else.

    Ranks of the outer group   0  1  2  3  4 ...      0 and 2 are the others
    ranks under test              0     1  2 ...
    """

    def __init__(self, outer: Threads) -> None:
        self.outer = outer
        self.name = f"sub of {outer.name}" if outer.name != "simulated" else "sub"
        self.speaks_tcp = outer.speaks_tcp
        self.lacks = outer.lacks

    def makers(self, size: int, timeout: float) -> list[Maker]:
        return self.outer.makers(size + 2, timeout)

    def place(self, world: Backend, size: int) -> tuple[Backend, bool]:
        outer, inside = self.outer.place(world, size + 2)
        if not inside:
            return outer, False
        others = (0, 2)
        if outer.rank in others:
            return outer.subgroup(others), False
        return outer.subgroup(set(range(size + 2)) - set(others)), True


def keep_busy(backend: Backend) -> None:
    """Traffic beside the ranks under test, which must not notice it."""
    other = 1 - backend.rank
    into = torch.empty(5)
    for number in range(5):
        backend.sendrecv(torch.full((5,), float(number)), other, into, other, tag=number)
        assert into.tolist() == [number] * 5
        assert phalanx.all_reduce(into, backend).tolist() == [2 * number] * 5


def whole(backend: Backend) -> Backend:
    """The backend that a subgroup's bytes go through: closing it is what the end of a rank does."""
    while isinstance(backend, SubBackend):
        backend = backend.parent
    return backend


def loopback_listener() -> socket.socket:
    """A free port of this host, already listening, so that nobody else can take it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    listener.setblocking(False)
    return listener


CLUSTERS: list[Cluster] = [
    Simulated(),
    Cooperative(),
    Tcp(),
    Gloo(),
    SubOf(Simulated()),
    SubOf(Tcp()),
    SubOf(SubOf(Simulated())),
    SharedMemory(),
    SubOf(SharedMemory()),
    Hybrid(),
]


def first_cause(failures: list[BaseException]) -> BaseException:
    """Of the errors of several ranks, the first that does not only tell that another is gone."""
    follows = (phalanx.PeerLostError, RankStopped)
    return next((error for error in failures if not isinstance(error, follows)), failures[0])


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or not thread.is_alive():
        return f"{thread.name}: has ended"
    return f"{thread.name}:\n" + "".join(traceback.format_stack(frame)[-6:])
