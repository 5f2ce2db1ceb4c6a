"""`Backend`: one rank's view of one group of ranks."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from operator import index
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.backends.engine import (
    ANY,
    Combine,
    Engine,
    Failure,
    Group,
    LocalStep,
    Operation,
    ReceiveBytes,
    Round,
    SendBytes,
    caller,
    ring_barrier,
)
from phalanx.backends.memory import Buffer, readable_bytes, writable_bytes
from phalanx.errors import DistributedError, InvalidRankError, PeerLostError, SelfSendError
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from typing_extensions import Self

    from phalanx.backends.sub import SubBackend

DEFAULT_TIMEOUT = 60.0
MAX_TAG = 2**31 - 1


class LinkCost(NamedTuple):
    """What it costs to send a message, for the choice of an algorithm. The same on every rank."""

    latency: float  # seconds until the receiver can go on
    overhead: float  # seconds of work for each message sent or received
    bandwidth: float  # bytes a second
    duplex: bool  # whether sending and receiving at the same time takes no longer than either


# Inside a host a byte costs a processor's time on either side, between hosts the wire's.
INSIDE_A_HOST = LinkCost(latency=70e-6, overhead=20e-6, bandwidth=2.5e9, duplex=False)
BETWEEN_HOSTS = LinkCost(latency=100e-6, overhead=20e-6, bandwidth=1.2e9, duplex=True)


def check_timeout(timeout: float) -> float:
    """The timeout as a float. Raises ValueError unless it is a positive number of seconds."""
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return float(timeout)


class Backend(ABC):
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

    def __init__(self, engine: Engine, group: Group, *, timeout: float) -> None:
        self.engine = engine
        self.group = group
        self.timeout = check_timeout(timeout)
        self.seconds_waiting = 0.0
        self._strict = os.environ.get("PHALANX_STRICT", "") == "1"
        self.plans: dict[Hashable, object] = {}  # what collectives have worked out before

    @property
    def rank(self) -> int:
        """This rank in this group."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in this group."""
        return self.group.size

    @property
    def link_cost(self) -> LinkCost:
        """What messages cost in this group, as estimated for all of its links."""
        return INSIDE_A_HOST if len(set(self.topology)) == 1 else BETWEEN_HOSTS

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size})"

    # Point to point -----------------------------------------------------------------------

    def send(
        self, data: Tensor | Buffer, dst: int, *, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send a tensor or buffer to rank `dst`; returns when its memory may be used again.

        The receiver need not have called `recv` yet. Messages to one rank with one tag arrive in
        order. Raises `InvalidRankError`, `SelfSendError`, `PeerLostError` and
        `CollectiveTimeoutError`. Moves the tensor's bytes once.
        """
        self.wait(self.start_send(data, dst, tag=tag, timeout=timeout))

    def start_send(
        self,
        data: Tensor | Buffer,
        dst: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        background: bool = False,
    ) -> Operation:
        """Begin to send; its memory may be used again when the operation is done."""
        self.check_peer(dst)
        view = readable_bytes(data)
        sends = (SendBytes(dst, 0, len(view)),)
        return self._message("send", dst, tag, Round(sends=sends), (view,), timeout, background)

    def start_recv(
        self,
        into: Tensor | Buffer,
        src: int | None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        background: bool = False,
    ) -> tuple[Operation, Callable[[], int]]:
        """Begin to receive. When the operation is done, call the function: it gives the sender."""
        if src is None:
            self._check_others()
        else:
            self.check_peer(src)
        view, stand_in = writable_bytes(into)
        peer = ANY if src is None else src
        round_ = Round(receives=(ReceiveBytes(peer, 0, len(view)),))
        operation = self._message("recv", peer, tag, round_, (view,), timeout, background)

        def finish() -> int:
            if stand_in is not None:
                into.detach().copy_(stand_in)
            return self.group.to_local[operation.sender]

        return operation, finish

    def recv(
        self, into: Tensor | Buffer, src: int | None, *, tag: int = 0, timeout: float | None = None
    ) -> int:
        """Receive from rank `src` into a tensor or writable buffer, which is filled whole.

        `src=None` takes the first message with this tag, whoever sends it. Returns the sender.
        Raises `SizeMismatchError` if the message has another size than `into`; the message is
        dropped then. After a `CollectiveTimeoutError` the message is not lost: the next `recv`
        gets it. Also raises `InvalidRankError`, `SelfSendError` and `PeerLostError`.
        """
        operation, finish = self.start_recv(into, src, tag=tag, timeout=timeout)
        self.wait(operation)
        return finish()

    def sendrecv(
        self,
        data: Tensor | Buffer,
        dst: int,
        into: Tensor | Buffer,
        src: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """`send` to `dst` and `recv` from `src` at the same time."""
        self.check_peer(dst)
        self.check_peer(src)
        outgoing = readable_bytes(data)
        view, stand_in = writable_bytes(into)
        round_ = Round(
            (SendBytes(dst, 0, len(outgoing)),), (ReceiveBytes(src, 0, len(view), buffer=1),)
        )
        operation = self._message("sendrecv", dst, tag, round_, (outgoing, view), timeout)
        self.wait(operation)
        if stand_in is not None:
            into.detach().copy_(stand_in)

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
        program: Sequence[Round | LocalStep],
        buffers: tuple[memoryview, ...] = (),
        *,
        combine: Combine | None = None,
        local: Callable[[LocalStep], None] | None = None,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
        background: bool = False,
    ) -> Operation:
        """Issue a collective: this rank's rounds and local steps. Returns at once.

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
                local=local,
                signature=signature,
                fingerprint=fingerprint,
                site=site,
                timeout=seconds,
            )
            self.engine.issue(operation)
        if background and not operation.done:
            self.engine.in_background(operation)
        return operation

    def wait(self, operation: Operation, *, timeout: float | None = None) -> None:
        """Block until an operation is done. Raises its error, each time it is called."""
        if not operation.done:
            if timeout is not None:
                operation.expect_within(self._timeout(timeout))
            began = monotonic()
            awaited = self.engine.awaited
            awaited.append(operation)
            try:
                self.engine.progress(operation)
            except BaseException as interruption:
                with self.engine.lock:
                    self.group.abandon(operation, f"interrupted by {type(interruption).__name__}")
                raise
            finally:
                awaited.remove(operation)
                self.seconds_waiting += monotonic() - began
        error = operation.error
        if error is not None:
            raise error.again() if isinstance(error, DistributedError) else error

    def fail(self, error: DistributedError) -> None:
        """Break the group on every rank because of an error of this one, which raises it itself.

        For code above the collectives that finds out, between two of them, that this rank cannot
        go on: the others wait for it, and learn here why it will not come.
        """
        with self.engine.lock:
            whole = self.group.ranks[self.rank]
            self.group.fail(Failure(type(error), whole, whole, str(error)))
            self.engine.run_ready()

    def _message(
        self,
        name: str,
        peer: int,
        tag: int,
        round_: Round,
        buffers: tuple[memoryview, ...],
        timeout: float | None,
        background: bool = False,
    ) -> Operation:
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"tag must be between 0 and {MAX_TAG}, not {tag}")
        signature = [f"tag {tag}"] if tag else []
        signature += ["from any rank"] if peer == ANY else []
        with self.engine.lock:
            operation = Operation(
                self.group,
                name,
                Channel(self.group.id, Kind.POINT_TO_POINT, tag),
                self.group.next_message(name, peer),
                (round_,),
                buffers,
                signature=", ".join(signature),
                site=caller(),
                timeout=self._timeout(timeout),
            )
            self.engine.issue(operation)
        if background and not operation.done:
            self.engine.in_background(operation)
        return operation

    def _timeout(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else check_timeout(timeout)

    def check_rank(self, rank: int, what: str = "rank") -> None:
        """Raise `InvalidRankError` unless `rank` is one of this group's."""
        try:
            exists = 0 <= index(rank) < self.world_size
        except TypeError:
            exists = False
        if not exists:
            raise InvalidRankError(
                f"rank {self.rank}: {what} {rank!r} is not one of the {self.world_size} ranks "
                f"0 to {self.world_size - 1}",
                rank=self.rank,
                peer=rank,
            )

    def check_peer(self, peer: int) -> None:
        """Raise unless `peer` is another rank of this group."""
        self.check_rank(peer, "peer")
        if peer == self.rank:
            raise SelfSendError(
                f"rank {self.rank}: a message to or from itself would wait for itself; "
                "copy the tensor instead",
                rank=self.rank,
                peer=peer,
            )

    def _check_others(self) -> None:
        """Raise unless there is another rank to receive from."""
        if self.world_size == 1:
            raise SelfSendError(
                f"rank {self.rank}: there is no other rank in this group to receive from",
                rank=self.rank,
            )

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
