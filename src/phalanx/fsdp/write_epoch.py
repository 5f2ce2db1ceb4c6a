"""When parameters are written: no rank reads them meanwhile, and none reads before all have.

    rank 0   forward  backward ............ | step |            forward
    rank 1   forward  evaluate  backward    | step, slowly |    forward
                                            ^              ^
                            meet: all read no more     meet: all have written

Only where ranks have the memory in common. Each rank writes its own part; it comes to the first
meeting when it begins to write, and so says that it reads no more, and goes on when all have come.
It comes to the second one when it has written, but waits for the others only before it reads again.
So every rank holds a lease on what it reads until it begins to write itself.

Elsewhere nobody but its rank sees a shard, and to write is only to note that full parameters are
out of date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from phalanx.core.backend import Backend
from phalanx.core.work import Operation
from phalanx.fsdp.flat_param import Flat


class Writing:
    """The write phases of one rank.

    epoch   how many there were; what a forward pass has read is of one of them
    """

    def __init__(self, flats: Sequence[Flat], group: Backend | None) -> None:
        self.epoch = 0
        self._flats = flats
        self._group = group
        self._in_place = group is not None and any(f.common and not f.apart for f in flats)
        self._converted = [f for f in flats if f.apart]
        self._copies = group is not None and any(f.common for f in self._converted)
        self._published: Operation | None = None
        self._under_way: str | None = None
        self._depth = 0  # a step may call that of its base class, of which torch tells, too
        self._versions = self._look()
        self._stale = True
        if self._in_place:
            self._say_written("it was built")

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Write in here. Every rank does so, and waits here until none reads."""
        self.begin(what)
        try:
            yield
        finally:
            self.end(what)

    def begin(self, what: str) -> None:
        """This rank reads no more, and is about to write. Blocks until the others are, too."""
        self._depth += 1
        if self._under_way is not None:
            return
        self._wait()
        for flat in self._flats:
            flat.free()
        if self._in_place:
            self._meet(f"FSDP: before {what}, {self.epoch}")
        self._under_way = what

    def end(self, what: str) -> None:
        """This rank has written."""
        self._depth -= 1
        if self._depth > 0:
            return
        self._depth = 0
        self._under_way = None
        self._written()
        if self._in_place:
            self._say_written(what)

    def settle(self) -> None:
        """Before full parameters are read: what was written is there, on all ranks."""
        if self._under_way is not None:  # a step that failed, or one that computes a closure
            self._depth = 0
            self.end(self._under_way)
        self._notice()
        self._wait()
        if not self._stale:
            return
        self._stale = False
        if self._copies:
            self._meet(f"FSDP: before shards are converted, {self.epoch}")
        for flat in self._converted:
            flat.convert()
        if self._copies:
            self._meet(f"FSDP: after shards are converted, {self.epoch}")

    def _notice(self) -> None:
        """Parameters may have been written by someone who did not say so, as `p.sub_(...)` does."""
        if self._look() != self._versions:
            self._written()
            if self._in_place:
                self._meet(f"FSDP: parameters were written, {self.epoch}")

    def _written(self) -> None:
        self.epoch += 1
        self._versions = self._look()
        self._stale = True
        for flat in self._flats:
            flat.written()

    def _wait(self) -> None:
        if self._published is not None:
            published, self._published = self._published, None
            assert self._group is not None
            self._group.wait(published)

    def _say_written(self, what: str) -> None:
        assert self._group is not None
        self._published = self._group.start_barrier(label=f"FSDP: after {what}, {self.epoch}")

    def _meet(self, label: str) -> None:
        assert self._group is not None
        self._group.barrier(label=label)

    def _look(self) -> int:
        return sum(p._version for flat in self._flats for p in flat.parameters)
