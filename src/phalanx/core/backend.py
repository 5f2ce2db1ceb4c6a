"""`Backend`: one rank's view of one group of ranks."""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from math import inf
from operator import index
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.core.common import common
from phalanx.core.engine import Engine
from phalanx.core.failure import Failure
from phalanx.core.group import Group
from phalanx.core.recorder import Record, call_site
from phalanx.core.steps import ANY, Call, Native, ReceiveBytes, Round, SendBytes, Step, ring_barrier
from phalanx.core.work import AnyOf, Combine, Operation, check_timeout
from phalanx.errors import (
    DistributedError,
    InvalidRankError,
    InvalidWorldSizeError,
    PeerLostError,
    SelfSendError,
)
from phalanx.wire.frame import Channel, Kind
from phalanx.wire.memory import Buffer, copy_bits, readable_bytes, writable_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

    from phalanx.core.steps import Epoch


# ------------------------------------------------------------------------------
# Messages between two ranks: the part of a backend that is not about all of a group.

MAX_TAG = 2**31 - 1


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
                site=call_site(),
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


# ------------------------------------------------------------------------------
# Collectives as a backend sees them: programs of its engine, issued in the group's order.


class Calls(Messages):
    """One rank's collectives with the other ranks of a group."""

    def __init__(self, engine: Engine, group: Group, *, timeout: float) -> None:
        super().__init__(engine, group, timeout=timeout)
        self._strict = os.environ.get("PHALANX_STRICT", "") == "1"

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
        site = call_site()
        if self._strict:
            fingerprint ^= xxh3_64_intdigest(str(site).encode())
        with self.engine.lock:
            sequence = group.next_sequence(fingerprint)
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
                rolling_hash=group.rolling_hash,
                site=site,
                timeout=seconds,
            )
            self.engine.issue(operation)
        if background and not operation.done:
            self.engine.in_background(operation)
        return operation

    def carry_out(
        self,
        name: str,
        steps: Iterator[Epoch],
        *,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Do a collective in which ranks only meet (`backends/shm`). Blocks until it is done.

        The same as `start` and `wait`. But where nothing is in the way, and the others come soon,
        no operation has to be made, queued, and woken up.
        """
        group, engine = self.group, self.engine
        if timeout is not None:
            check_timeout(timeout)
        site = call_site()
        if self._strict:
            fingerprint ^= xxh3_64_intdigest(str(site).encode())
        with engine.lock:
            sequence, rolling_hash = group.next_sequence(fingerprint), group.rolling_hash
            began = monotonic()
            engine.glance(began)
            if group.is_free():
                try:
                    waiting = _carried_out(steps, rolling_hash)
                except BaseException as error:
                    steps = _raising(error)
                else:
                    if waiting is None:
                        group.was_done(
                            Record(
                                *(name, sequence, signature, group.suffix, site),
                                *(fingerprint, began, monotonic(), False),
                            )
                        )
                        return
                    steps = chain((waiting,), steps)
            operation = Operation(
                group,
                name,
                Channel(group.id, Kind.COLLECTIVE, sequence),
                sequence,
                steps,
                signature=signature,
                fingerprint=fingerprint,
                rolling_hash=rolling_hash,
                site=site,
                timeout=self._timeout(timeout),
            )
            self._issue(operation)
        self.wait(operation)

    def call(
        self,
        call: Call,
        *,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Do a collective that is the library's own (`Backend.native`). Blocks until it is done.

        The same as `start` and `wait`, but that no operation is made where it is over soon.
        """
        group, engine = self.group, self.engine
        name, site, seconds = call.collective, call_site(), self._timeout(timeout)
        with engine.lock:
            sequence, rolling_hash = group.next_sequence(fingerprint), group.rolling_hash
            began = monotonic()
            engine.glance(began)
            step: Step | None = call
            if group.is_free():
                step = engine.begin_call(group, call, seconds)
                if step is None:
                    ended = monotonic()
                    self._waited(ended - began)
                    group.was_done(
                        Record(
                            *(name, sequence, signature, group.suffix, site),
                            *(fingerprint, began, ended, False),
                        )
                    )
                    return
            operation = Operation(
                group,
                name,
                Channel(group.id, Kind.COLLECTIVE, sequence),
                sequence,
                (step,),
                signature=signature,
                fingerprint=fingerprint,
                rolling_hash=rolling_hash,
                site=site,
                timeout=seconds,
            )
            self._issue(operation)
        self.wait(operation)

    def _issue(self, operation: Operation) -> None:
        """Begin it here and now; an interrupt that comes meanwhile ends it. Lock held."""
        try:
            self.engine.issue(operation)
        except Exception:
            raise
        except BaseException as interruption:
            self.group.abandon(operation, f"interrupted by {type(interruption).__name__}")
            raise

    def fail(self, error: DistributedError, *, culprit: int | None = None) -> None:
        """Break the group on every rank because of an error of this one, which raises it itself.

        For code above the collectives that finds out, between two of them, that this rank cannot
        go on: the others wait for it, and learn here why it will not come. They blame the error's
        `peer`, or else this rank; or `culprit`, a rank of the job that need not be a member.
        """
        with self.engine.lock:
            ranks, blamed = self.group.ranks, self.rank if error.peer is None else error.peer
            whole = ranks[blamed] if culprit is None else culprit
            failure = Failure(type(error), whole, ranks[self.rank], str(error))
            self.group.fail(failure)
            self.engine.run_ready()


def _carried_out(steps: Iterator[Epoch], rolling_hash: int) -> Epoch | None:
    """Do one step after the other; the one to which not everybody has come soon enough, or None."""
    for epoch in steps:
        epoch.begin(rolling_hash)
        if not epoch.spin():
            return epoch
    return None


def _raising(error: BaseException) -> Iterator[Epoch]:
    """Steps that end in an error."""

    def fail() -> Epoch:
        raise error

    return iter(fail, None)


# ------------------------------------------------------------------------------

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
        epochs = self._meets()
        if epochs is not None:
            self.carry_out(
                "barrier", epochs, signature=label, fingerprint=_hash(label), timeout=timeout
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
        control = self.group.shared
        return control is not None and control.size == self.world_size

    @property
    def spares_a_processor(self) -> bool:
        """Whether a collective gains from a thread that moves it on while this rank computes.

        By messages it does, since bytes travel by themselves. In shared memory it is work like any
        other, for which there has to be a processor that has none.
        """
        return not self.shares_memory or self.links.processors > self.world_size

    def _meets(self) -> Iterator[Epoch] | None:
        control = self.group.shared
        if control is None or control.size < self.world_size:
            return None
        return iter((control.epoch(first=True),))

    def subgroup(self, members: Iterable[int]) -> SubBackend:
        """A backend for some of this one's ranks. Each of them calls this; no bytes are sent."""

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
                self.engine.announce_leaving(self.group)
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


# ------------------------------------------------------------------------------
# `SubBackend`: some of a backend's ranks, as a group of their own.


class SubBackend(Backend):
    """Some ranks of `parent`, renumbered from 0 in the order of their ranks there.

    parent    the backend that it is part of; may itself be a `SubBackend`
    members   sorted and without repeats, as ranks of `parent`

    Every member makes it, in the same order among groups of the same members; nothing is sent.
    It moves bytes over its parent's connections, but neither waits for the parent's operations
    nor mixes with them. Closing it leaves the parent open.

    Raises `InvalidWorldSizeError` for no members; `InvalidRankError` if one is not a rank of the
    parent, or the caller is not among them.
    """

    def __init__(self, parent: Backend, members: Iterable[int]) -> None:
        self.parent = parent
        self.members = tuple(sorted(set(members)))
        if not self.members:
            raise InvalidWorldSizeError(
                f"rank {parent.rank}: a group needs at least one member", rank=parent.rank
            )
        for member in self.members:
            parent.check_rank(member, "member")
        if parent.rank not in self.members:
            raise InvalidRankError(
                f"rank {parent.rank} makes a group of ranks {list(self.members)} without being one "
                "of them: only members make a group",
                rank=parent.rank,
            )
        whole = tuple(parent.group.ranks[member] for member in self.members)
        engine = parent.engine
        with engine.lock:
            group = parent.group.child(whole)
        super().__init__(engine, group, timeout=parent.timeout)
        self.devices = parent.devices
        self.links = parent.links
        self.topology = tuple(parent.topology[member] for member in self.members)

    def to_global(self, local: int) -> int:
        """The parent's number for rank `local` of this group."""
        self.check_rank(local)
        return self.members[local]

    def to_local(self, global_: int) -> int | None:
        """This group's number for rank `global_` of the parent; None if it is no member."""
        return self.members.index(global_) if global_ in self.members else None

    def _waited(self, seconds: float) -> None:
        super()._waited(seconds)
        self.parent._waited(seconds)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """As the parent's: memory is one, whichever group it is sent in."""
        return self.parent.empty(*shape, dtype=dtype)


# ------------------------------------------------------------------------------
# What links cost, as estimates for the choice of an algorithm.


class LinkCost(NamedTuple):
    """What it costs to send a message, for the choice of an algorithm. The same on every rank."""

    latency: float  # seconds until the receiver can go on
    overhead: float  # seconds of work for each message sent or received
    bandwidth: float  # bytes a second
    duplex: bool  # whether sending and receiving at the same time takes no longer than either


class Links(NamedTuple):
    """The links of a group. All ranks of a host share one bandwidth out of it, and one into it."""

    inside: LinkCost  # a host
    between: LinkCost  # hosts
    processors: float = inf  # of a host, which its ranks share; the same number on all of them


# Inside a host a byte costs a processor's time on either side, between hosts the wire's. Measured
# with 2, 3 and 4 processes on two processors, as the times of all algorithms of all_reduce, from
# 8 bytes to 16 MiB, in turn.
INSIDE_A_HOST = LinkCost(latency=70e-6, overhead=20e-6, bandwidth=2.5e9, duplex=False)
BETWEEN_HOSTS = LinkCost(latency=100e-6, overhead=20e-6, bandwidth=1.2e9, duplex=True)


# ------------------------------------------------------------------------------
# What becomes of a backend that is still open when the interpreter ends.


class CloseAtExit:
    """Closes a backend when the interpreter ends, without keeping it alive."""

    def __init__(self, backend: Backend) -> None:
        self._backend = weakref.ref(backend)
        atexit.register(self)

    def __call__(self) -> None:
        """The interpreter ends."""
        backend = self._backend()
        if backend is not None:
            with suppress(DistributedError, OSError):
                backend.close()

    def cancel(self) -> None:
        """There is nothing to close any more."""
        atexit.unregister(self)
