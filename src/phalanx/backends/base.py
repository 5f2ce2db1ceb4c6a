"""`Backend`: one rank's view of one group of ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.backends.calls import Calls
from phalanx.backends.common import common
from phalanx.backends.engine import (
    Engine,
    Failure,
    Group,
    Operation,
    Step,
    ring_barrier,
)
from phalanx.backends.links import BETWEEN_HOSTS, INSIDE_A_HOST, Links
from phalanx.backends.native import Call, Native
from phalanx.backends.shm.meeting import Meet
from phalanx.errors import DistributedError, PeerLostError

if TYPE_CHECKING:
    from typing_extensions import Self

    from phalanx.backends.sub import SubBackend

DEFAULT_TIMEOUT = 60.0
_BARRIER = Call("barrier")


def _hash(label: str) -> int:
    return xxh3_64_intdigest(label.encode()) if label else 0


class Backend(Calls):
    """One rank's view of one group of ranks, and the ways to move bytes between them.

    rank         this rank, 0 <= rank < world_size
    world_size   how many there are
    timeout      seconds that a call waits at most, unless it is told otherwise
    topology     for each rank the number of the host that it is on
    links        what messages cost inside a host and between hosts; the same on every rank
    seconds_waiting  the time that calls of this backend have spent blocked, summed; those of groups
                 that were made of it, too

    Blocking calls block this rank only. After a failure of a collective the group is broken:
    every later call on it raises the first cause at once. Use it in a `with` statement, or call
    `close()`. Any thread may call, but the order of collectives is the order of the calls, and
    has to be the same on every rank.
    """

    topology: tuple[int, ...]
    native: Native | None  # collectives of the library that it stands on
    devices: frozenset[str] = frozenset({"cpu"})  # kinds of device whose tensors it takes

    def __init__(self, engine: Engine, group: Group, *, timeout: float) -> None:
        super().__init__(engine, group, timeout=timeout)
        # What a library does whole, nobody compares.
        self.native = None if self._strict else engine.native_for(group)
        self.links = Links(inside=INSIDE_A_HOST, between=BETWEEN_HOSTS)
        self.plans: dict[Hashable, object] = {}  # what collectives have worked out before

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size})"

    # Groups -------------------------------------------------------------------------------

    def barrier(self, *, label: str = "", timeout: float | None = None) -> None:
        """Wait until every rank of the group has called this, with the same label.

        2p messages of no bytes; in shared memory, one look at each other's flags; or the library's
        own.
        """
        meets = self._meets()
        if meets is not None:
            self.carry_out(
                "barrier", meets, signature=label, fingerprint=_hash(label), timeout=timeout
            )
        else:
            self.wait(self.start_barrier(label=label, timeout=timeout))

    def start_barrier(
        self, *, label: str = "", timeout: float | None = None, background: bool = False
    ) -> Operation:
        """Begin a barrier; when the operation is done, every rank has come."""
        steps: Iterable[Step] | None = self._meets()
        if steps is None and self.native is not None and self.native.has(_BARRIER):
            steps = (_BARRIER,)
        if steps is None:
            steps = ring_barrier(self.rank, self.world_size)
        return self.start(
            "barrier",
            steps,
            signature=label,
            fingerprint=_hash(label),
            timeout=timeout,
            background=background,
        )

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks share memory, in which collectives are done."""
        window = self.group.window
        return window is not None and window.size == self.world_size

    @property
    def spares_a_processor(self) -> bool:
        """Whether a collective gains from a thread that moves it on while this rank computes.

        By messages it does, since bytes travel by themselves. In shared memory it is work like any
        other, for which there has to be a processor that has none.
        """
        return not self.shares_memory or self.links.processors > self.world_size

    def _meets(self) -> Iterator[Meet] | None:
        window = self.group.window
        if window is None or window.size < self.world_size:
            return None
        return iter((Meet(window, first=True),))

    def subgroup(self, members: Iterable[int]) -> SubBackend:
        """A backend for some of this one's ranks. Each of them calls this; no bytes are sent."""
        from phalanx.backends.sub import SubBackend  # noqa: PLC0415 - it is a Backend itself

        return SubBackend(self, members)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialized tensor in memory that this backend sends without a copy."""
        return self.engine.empty(shape, dtype)

    def common(
        self, count: int, dtype: torch.dtype = torch.float32, *, timeout: float | None = None
    ) -> Tensor | None:
        """Memory that all ranks of the group have in common, as `count` elements, all zero.

        What one rank writes there the others see after the next barrier, or after another
        collective of the group in which they wait for that rank. Who writes what when is the
        callers' business: nothing else ever reads or writes it.

        Every rank of the group calls this, in the same order among its collectives, with the same
        arguments; it blocks until all have the memory. None if they have none in common, which
        costs no message: over TCP, over another library, and for ranks on several hosts. A group
        of one rank has its own.

        The tensor is 1-D. Its memory takes pages of the system when these are first written, once
        for all ranks. It stays until the last tensor in it, on any rank, is gone, also when the
        backend is closed; it has no name, so nothing is left of processes that are killed. 3(p-1)
        small messages.

        Raises `BackendUnavailableError` on every rank alike if one of them (`peer`) could not take
        or attach it: the message says why, and the group goes on. `DesyncError`,
        `CollectiveTimeoutError`, `PeerLostError`; ValueError for a negative count.
        """
        return common(self, count, dtype, timeout=timeout)

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
