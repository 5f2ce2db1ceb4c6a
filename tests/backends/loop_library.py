"""A library in memory, for tests of what stands on libraries: it moves nothing unless it is asked.

It all-reduces sums, and only that. On the device "meta", whose tensors hold no values, its
collectives stand for those that run on a stream: they are over when the test says so.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from typing_extensions import override

from phalanx.core.steps import Call
from phalanx.native.base import Abilities, Handle, Library


@dataclass
class Loop:
    """What the ranks of one group have in common."""

    size: int
    can: Abilities
    lock: Any = field(default_factory=threading.RLock)
    sends: Any = field(default_factory=lambda: defaultdict(deque))
    receives: Any = field(default_factory=lambda: defaultdict(deque))
    calls: Any = field(default_factory=lambda: defaultdict(dict))  # number -> rank -> handle
    groups: Any = field(default_factory=dict)
    released: int = 0  # collectives on a stream that are over
    broken: str = ""
    slowness: int = 0  # how often a receive with tag 1 has to be asked before it is over

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
        self.asks_left = 0

    @override
    def done(self) -> bool:
        with self.loop.lock:
            if self.loop.broken:
                raise OSError(self.loop.broken)
            if self.on_stream:
                return self.number < self.loop.released
            self.asks_left -= self.over
            return self.over and self.asks_left < 0

    @override
    def wait(self, seconds: float) -> bool:
        self.waited_by.append(threading.current_thread().name)
        return self.on_stream or self.done()


class LoopLibrary(Library):
    """One rank's view."""

    name = "Loop"

    def __init__(self, loop: Loop, rank: int) -> None:
        super().__init__()
        self.loop, self.rank, self.size, self.can = loop, rank, loop.size, loop.can
        self.started: list[Part] = []
        self.closed = False

    @override
    def has(self, call: Call) -> bool:
        return (call.collective == "all_reduce" and call.op == "sum") or (
            call.collective == "barrier"
        )

    @override
    def collective(self, call: Call) -> Handle:
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
    def send(self, view: memoryview, peer: int, tag: int) -> Handle:
        part = Part(self.loop, view)
        return self._meet(part, (self.rank, peer, tag), self.loop.sends)

    @override
    def recv(self, view: memoryview, peer: int, tag: int) -> Handle:
        part = Part(self.loop, view)
        part.asks_left = self.loop.slowness * tag
        return self._meet(part, (peer, self.rank, tag), self.loop.receives)

    def _meet(self, part: Part, key: Any, line: Any) -> Part:
        with self.loop.lock:
            line[key].append(part)
            sends, receives = self.loop.sends[key], self.loop.receives[key]
            while sends and receives:
                sent, received = sends.popleft(), receives.popleft()
                received.memory[:] = sent.memory  # an error if the sizes differ
                sent.over = received.over = True
        return part

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        with self.loop.lock:
            loop = self.loop.groups.setdefault(ident, Loop(len(members), self.can))
        return LoopLibrary(loop, list(members).index(self.rank))

    @override
    def close(self) -> None:
        self.closed = True

    @override
    def abort(self) -> None:
        with self.loop.lock:
            self.loop.broken = "the group was given up"
