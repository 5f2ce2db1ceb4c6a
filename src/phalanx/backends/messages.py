"""Messages between two ranks: the part of a backend that is not about all of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from time import monotonic

from torch import Tensor

from phalanx.backends.engine import (
    ANY,
    AnyOf,
    Engine,
    Group,
    Operation,
    ReceiveBytes,
    Round,
    SendBytes,
    caller,
)
from phalanx.backends.memory import Buffer, copy_bits, readable_bytes, writable_bytes
from phalanx.errors import DistributedError, InvalidRankError, SelfSendError
from phalanx.wire.frame import Channel, Kind

MAX_TAG = 2**31 - 1


def check_timeout(timeout: float) -> float:
    """The timeout as a float. Raises ValueError unless it is a positive number of seconds."""
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return float(timeout)


class Messages:
    """One rank's messages to and from the other ranks of a group."""

    def __init__(self, engine: Engine, group: Group, *, timeout: float) -> None:
        self.engine = engine
        self.group = group
        self.timeout = check_timeout(timeout)
        self.seconds_waiting = 0.0

    @property
    def rank(self) -> int:
        """This rank in this group."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in this group."""
        return self.group.size

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
                copy_bits(into.detach(), stand_in)
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
            copy_bits(into.detach(), stand_in)

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
                self._waited(monotonic() - began)
        error = operation.error
        if error is not None:
            raise error.again() if isinstance(error, DistributedError) else error

    def wait_any(self, operations: Sequence[Operation], *, timeout: float = math.inf) -> None:
        """Block until one of some operations of this rank is done, of any groups; see `wait_any`.

        Ranks are named in this group's numbers. ValueError if there are none.
        """
        if not operations:
            raise ValueError(f"rank {self.rank}: wait_any of nothing would wait for ever")
        until = AnyOf(self.group, operations, check_timeout(timeout))
        if until.done:
            return
        began = monotonic()
        awaited = self.engine.awaited
        awaited.append(until)
        try:
            self.engine.progress(until)
        finally:
            awaited.remove(until)
            self._waited(monotonic() - began)
        if until.error is not None:
            raise until.error

    def give_up(self, operation: Operation, reason: str) -> None:
        """End a message of this group that is under way; its memory is the caller's again.

        One that has not come is had by the next receive; one that has not gone never comes.
        """
        with self.engine.lock:
            self.group.abandon(operation, reason)
            self.engine.run_ready()

    def _waited(self, seconds: float) -> None:
        """A call was blocked for so long."""
        self.seconds_waiting += seconds

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
