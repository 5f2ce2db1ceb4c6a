"""`Backend`: one rank's view of one group of ranks."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.backends.engine import (
    Combine,
    Engine,
    Failure,
    Group,
    Operation,
    Step,
    caller,
    ring_barrier,
)
from phalanx.backends.links import BETWEEN_HOSTS, INSIDE_A_HOST, LinkCost
from phalanx.backends.messages import Messages
from phalanx.backends.native import Native
from phalanx.errors import DistributedError, PeerLostError
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from typing_extensions import Self

    from phalanx.backends.sub import SubBackend

DEFAULT_TIMEOUT = 60.0


class Backend(Messages):
    """One rank's view of one group of ranks, and the ways to move bytes between them.

    rank         this rank, 0 <= rank < world_size
    world_size   how many there are
    timeout      seconds that a call waits at most, unless it is told otherwise
    topology     for each rank the number of the host that it is on
    seconds_waiting  the time that calls of this backend have spent blocked, summed

    Blocking calls block this rank only. After a failure of a collective the group is broken:
    every later call on it raises the first cause at once. Use it in a `with` statement, or call
    `close()`. Any thread may call, but the order of collectives is the order of the calls, and
    has to be the same on every rank.
    """

    topology: tuple[int, ...]
    native: Native | None  # collectives of the library that it stands on

    def __init__(self, engine: Engine, group: Group, *, timeout: float) -> None:
        super().__init__(engine, group, timeout=timeout)
        self.native = engine.native_for(group)
        self._strict = os.environ.get("PHALANX_STRICT", "") == "1"
        self.plans: dict[Hashable, object] = {}  # what collectives have worked out before

    @property
    def link_cost(self) -> LinkCost:
        """What messages cost in this group, as estimated for all of its links."""
        return INSIDE_A_HOST if len(set(self.topology)) == 1 else BETWEEN_HOSTS

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size})"

    # Groups -------------------------------------------------------------------------------

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank of the group has called this. 2p messages of no bytes."""
        self.wait(self.start("barrier", ring_barrier(self.rank, self.world_size), timeout=timeout))

    def subgroup(self, members: Iterable[int]) -> SubBackend:
        """A backend for some of this one's ranks. Each of them calls this; no bytes are sent."""
        from phalanx.backends.sub import SubBackend  # noqa: PLC0415 - it is a Backend itself

        return SubBackend(self, members)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialized tensor in memory that this backend sends without a copy."""
        return torch.empty(shape, dtype=dtype)

    # For collectives ----------------------------------------------------------------------

    def start(
        self,
        name: str,
        program: Iterable[Step],
        buffers: tuple[memoryview, ...] = (),
        *,
        combine: Combine | None = None,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
        background: bool = False,
    ) -> Operation:
        """Issue a collective: this rank's steps. Returns at once.

        Every rank of the group issues its own part, in the same order. `fingerprint` has to be
        equal on all of them. With `background` it moves on while nobody waits for it.
        """
        group = self.group
        seconds = self._timeout(timeout)
        site = caller()
        if self._strict:
            fingerprint ^= xxh3_64_intdigest(str(site).encode())
        with self.engine.lock:
            sequence = group.next_sequence()
            operation = Operation(
                group,
                name,
                Channel(group.id, Kind.COLLECTIVE, sequence),
                sequence,
                program,
                buffers,
                combine=combine,
                signature=signature,
                fingerprint=fingerprint,
                site=site,
                timeout=seconds,
            )
            self.engine.issue(operation)
        if background and not operation.done:
            self.engine.in_background(operation)
        return operation

    def fail(self, error: DistributedError) -> None:
        """Break the group on every rank because of an error of this one, which raises it itself.

        For code above the collectives that finds out, between two of them, that this rank cannot
        go on: the others wait for it, and learn here why it will not come.
        """
        with self.engine.lock:
            whole = self.group.ranks[self.rank]
            self.group.fail(Failure(type(error), whole, whole, str(error)))
            self.engine.run_ready()

    # The end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave: peers that wait for this rank are told so. Bounded in time; may be repeated."""
        with self.engine.lock:
            if not self.group.closed:
                self.group.close()
                self.engine.tell_leaving(self.group)
                self.engine.run_ready()

    def abort(self) -> None:
        """Leave at once: to the others this rank is lost, and the group is broken."""
        with self.engine.lock:
            group = self.group
            if not group.closed:
                whole = group.ranks[group.rank]
                reason = f"rank {group.name_of(group.rank)} was lost: it aborted"
                group.close()
                self.engine.tell(group, Failure(PeerLostError, whole, whole, reason))
                self.engine.run_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(DistributedError):
            self.close()
