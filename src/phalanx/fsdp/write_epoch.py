"""Write epochs: while parameters are written no rank reads them, and none reads before all have.

    rank 0   forward  backward ........ | step |            forward
    rank 1   forward ...... backward    | step, slowly |    forward
                                        ^              ^
                    barrier: all read no more      barrier: all have written

Only if ranks have the memory in common. Each rank writes its own part. It enters the first barrier
when it begins to write, and so reads no more, and waits there for the others. It enters the second
one when it has written, but waits for the others only before it reads again. So the values that a
rank reads do not change until it begins to write itself.

Elsewhere nobody but its rank sees a shard, and to write is only to note that unsharded parameters
are out of date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from phalanx.collectives import PendingCollective
from phalanx.core.backend import Backend
from phalanx.fsdp.parameter_group import ParameterGroup


class WriteEpoch:
    """Counts the write epochs of one rank, and keeps their readers and writers apart.

    number   number of epochs so far; a forward pass reads the values of one of them
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], world: Backend, shard_group: Backend
    ) -> None:
        self.number = 0
        self._groups = groups
        self._flats = [flat for group in groups for flat in group.flats]
        self._world = world
        self._shard_group = shard_group
        self._in_place = any(flat.common and not flat.apart for flat in self._flats)
        self._copies = any(flat.common and flat.apart for flat in self._flats)
        self._all_written: PendingCollective[None] | None = None
        self._writer: str | None = None  # the write under way
        self._depth = 0  # a step may call that of its base class, of which torch tells, too
        self._versions = self._count_versions()
        self._stale = True
        if self._in_place:
            self._say_written("it was built")

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Write in here. Every rank does so, and waits here until none reads."""
        self.begin(what)
        try:
            yield
        finally:
            self.end(what)

    def begin(self, what: str) -> None:
        """Begin to write: this rank reads no more. Blocks until the others do so, too."""
        self._depth += 1
        if self._writer is not None:
            return
        self._world.mark(f"FSDP begins {what}")
        self._wait_for_writers()
        for group in self._groups:
            group.reshard()
        if self._in_place:
            self._shard_group.barrier(label=f"FSDP: before {what}, {self.number}")
        self._writer = what

    def end(self, what: str) -> None:
        """End the write: this rank reads again."""
        self._depth -= 1
        if self._depth > 0:
            return
        self._depth = 0
        self._writer = None
        self._next_epoch()
        if self._in_place:
            self._say_written(what)

    def wait_for_writes(self) -> None:
        """Wait, before parameters are read, until all ranks' writes are there."""
        barrier = self._shard_group.barrier
        if self._writer is not None:  # a step that failed, or one that computes a closure
            self._depth = 0
            self.end(self._writer)
        if self._count_versions() != self._versions:
            # Somebody has written without `writing()`, as by `p.sub_(...)`.
            self._next_epoch()
            if self._in_place:
                barrier(label=f"FSDP: parameters were written, {self.number}")
        self._wait_for_writers()
        if not self._stale:
            return
        self._stale = False
        if self._copies:
            barrier(label=f"FSDP: before shards are converted, {self.number}")
        for flat in self._flats:
            flat.convert()
        if self._copies:
            barrier(label=f"FSDP: after shards are converted, {self.number}")

    def _next_epoch(self) -> None:
        self.number += 1
        self._versions = self._count_versions()
        self._stale = True
        for group in self._groups:
            group.reshard()
            if group.waiting:  # a graph that has read the old values goes no way back
                group.waiting.clear()
        for flat in self._flats:
            flat.current = False

    def _wait_for_writers(self) -> None:
        if self._all_written is not None:
            written, self._all_written = self._all_written, None
            written.wait()

    def _say_written(self, what: str) -> None:
        label = f"FSDP: after {what}, {self.number}"
        self._all_written = self._shard_group.ibarrier(label=label, background=False)

    def _count_versions(self) -> int:
        return sum(p._version for flat in self._flats for p in flat.parameters)
