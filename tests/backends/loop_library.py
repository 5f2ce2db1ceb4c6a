"""A library in memory, for tests of what stands on libraries: it moves nothing unless it is asked.

It all-reduces sums, and only that. On the device "meta", whose tensors hold no values, its
collectives stand for those that run on a stream: to wait for one makes the stream wait, at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from clusters import Threads
from torch import Tensor
from typing_extensions import override

from phalanx import Backend, ReduceOp
from phalanx.core.steps import NativeCall
from phalanx.native.base import Handle, Library, LibraryBackend
from phalanx.native.store_rendezvous import rendezvous_by, route_by


@dataclass
class Loop:
    """What the ranks of one group have in common."""

    size: int
    devices: frozenset[str]
    on_stream: bool
    lock: Any = field(default_factory=threading.RLock)
    calls: Any = field(default_factory=lambda: defaultdict(dict))  # number -> rank -> handle
    groups: Any = field(default_factory=dict)
    broken: str = ""
    at_wait: Callable[[], bool] | None = None  # what a wait does instead

    def libraries(self) -> list[LoopLibrary]:
        """One for each rank."""
        return [LoopLibrary(self, rank) for rank in range(self.size)]


class Part(Handle):
    """One rank's part in something."""

    def __init__(self, loop: Loop, memory: Any, number: int = -1) -> None:
        self.loop, self.memory, self.number = loop, memory, number
        self.over = False
        self.on_stream = isinstance(memory, Tensor) and memory.device.type == "meta"
        self.waited_by: list[str] = []

    @override
    def done(self) -> bool:
        with self.loop.lock:
            if self.loop.broken:
                raise OSError(self.loop.broken)
            return self.over

    @override
    def wait(self, seconds: float) -> bool:
        self.waited_by.append(threading.current_thread().name)
        if self.loop.at_wait is not None:
            return self.loop.at_wait()
        return self.on_stream or self.done()


class LoopLibrary(Library):
    """One rank's view."""

    name = "Loop"

    def __init__(self, loop: Loop, rank: int) -> None:
        self.loop, self.rank, self.size = loop, rank, loop.size
        self.devices, self.on_stream = loop.devices, loop.on_stream
        self.started: list[Part] = []
        self.closed = False

    @override
    def has(self, call: NativeCall) -> bool:
        return call.collective == "all_reduce" and call.op is ReduceOp.SUM

    @override
    def collective(self, call: NativeCall) -> Handle:
        with self.loop.lock:
            part = Part(self.loop, call.out, len(self.started))
            self.started.append(part)
            parts = self.loop.calls[part.number]
            parts[self.rank] = (part, None if call.source is None else call.source.clone())
            if len(parts) == self.size:
                for each, _ in parts.values():
                    if each.memory is not None and not each.on_stream:
                        each.memory.copy_(sum(given for _, given in parts.values()))
                    each.over = True
        return part

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        with self.loop.lock:
            loop = self.loop.groups.setdefault(
                ident, Loop(len(members), self.devices, self.on_stream)
            )
        return LoopLibrary(loop, list(members).index(self.rank))

    @override
    def close(self) -> None:
        self.closed = True

    @override
    def abort(self) -> None:
        with self.loop.lock:
            self.loop.broken = "the group was given up"


class Looped(Threads):
    """Backends over a library in memory, whose mesh is on the loopback interface."""

    name = "loop"

    def __init__(self, *devices: str, on_stream: bool = False) -> None:
        self.devices, self.on_stream = frozenset(devices or ("cpu",)), on_stream
        self.libraries: list[LoopLibrary] = []
        self.join_fails = ""  # what the library says as the ranks join

    @override
    def makers(self, world_size: int, timeout: float) -> list[Callable[[], Backend]]:
        self.libraries = libraries = Loop(world_size, self.devices, self.on_stream).libraries()
        told: Future[bytes] = Future()

        def make(rank: int) -> Backend:
            def broadcast(block: bytearray) -> None:
                if rank == 0:
                    told.set_result(bytes(block))
                block[:] = told.result(timeout)

            def join(topology: tuple[int, ...]) -> LoopLibrary:
                if self.join_fails:
                    raise OSError(self.join_fails)
                return libraries[rank]

            met = rendezvous_by(broadcast, rank, route_by(), one_host=True)
            return LibraryBackend(rank, world_size, met, join, name="Loop", timeout=timeout)

        return [partial(make, rank) for rank in range(world_size)]
