"""`Backend`: one rank's membership of one group of ranks, and the ways to move bytes in it.

Backend.run     a blocking collective: begun by the caller at once, where nothing is in the way
Backend.issue   a collective or message that goes on by itself: a `Work`
SubBackend      some of a backend's ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from phalanx.core.call import WORLD_ID, Call, call_site, check_timeout, whole_number
from phalanx.core.common import CommonMemory, Own
from phalanx.core.counters import Counts, Progress
from phalanx.core.device import device_of
from phalanx.core.engine import Engine
from phalanx.core.failure import Failure
from phalanx.core.group import ASYNCHRONOUS, BLOCKING, Group, Spin
from phalanx.core.posted import Combine
from phalanx.core.shared_group import SharedGroup
from phalanx.core.steps import (
    ANY,
    Program,
    ReceiveBytes,
    Round,
    SendBytes,
    ring_barrier,
)
from phalanx.core.transport import BETWEEN_HOSTS, INSIDE_A_HOST, Links
from phalanx.core.work import AnyOf, Work
from phalanx.errors import (
    DistributedError,
    InvalidRankError,
    InvalidWorldSizeError,
    PeerLostError,
    SelfSendError,
    UnsupportedObjectError,
    UnsupportedOperationError,
)
from phalanx.wire.frame import Channel, Kind
from phalanx.wire.memory import (
    Buffer,
    check_distinct,
    copy_bits,
    readable_bytes,
    tensor_bytes,
    why_not_movable,
    writable_bytes,
)

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
DEFAULT_TIMEOUT = 60.0
"""Seconds that a call waits at most, where neither it nor its backend was told otherwise."""
MAX_TAG = 2**31 - 1
PATIENCE = 0.05  # seconds that a work is left to its waiter, if no processor is spare


class Backend:
    """One rank's view of one group of ranks, and the ways to move bytes between them.

    rank         this rank, 0 <= rank < world_size
    world_size   number of ranks
    ranks        their numbers in the whole job, in the order of their numbers here
    timeout      seconds that a call waits at most, unless it is told otherwise
    topology     for each rank the number of the host that it is on
    links        costs of messages inside a host and between hosts; the same on every rank
    shared       the memory that ranks of this host have for collectives, if there is any
    shares_memory  whether all ranks of the group share it, so that collectives are done there
    seconds_waiting  the time that calls of this backend have spent blocked, summed; those of groups
                 that were made of it, too

    A world over a transport of your own is made of an `Engine` that has it, as in
    `examples/own_backend.py`.

    Blocking calls block this rank only. After a failure of a collective the group is broken:
    every later call on it raises the first cause at once. Use it in a `with` statement, or call
    `close()`. Any thread may call, but the order of collectives is the order of the calls, and
    has to be the same on every rank.
    """

    devices: frozenset[str] = frozenset({"cpu"})  # kinds of device whose tensors it takes

    def __init__(
        self, engine: Engine, group: Group | None = None, *, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        if group is None:
            group = Group(engine, WORLD_ID, tuple(range(engine.world_size)))
        self.engine = engine
        self.group = group
        self.rank = group.rank
        self.world_size = group.size
        self.ranks = group.ranks
        self.share(group.shared)
        self.timeout = check_timeout(timeout)
        self.topology: tuple[int, ...] = (0,) * group.size
        # A collective that a library does whole cannot be compared before it runs.
        self.native = None if engine.strict else engine.native(group)
        self.links = Links(inside=INSIDE_A_HOST, between=BETWEEN_HOSTS)
        # Of upper layers: results that may be dropped; and state that they keep.
        self.cache: dict[Hashable, object] = {}
        self.kept: dict[Hashable, object] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: copies of its owners share it, as there is one connection to a peer."""
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedObjectError(
            f"rank {self.rank}: a backend is the connections of this process, and cannot be "
            "pickled. Of a model that has one, pickle the state_dict(), or call save_checkpoint()"
        )

    def share(self, shared: SharedGroup | None) -> None:
        """Give ranks of this host this memory for the group's collectives, from now on."""
        self.shared = self.group.shared = shared
        self.shares_memory = shared is not None and shared.size == self.world_size

    @property
    def failure(self) -> Failure | None:
        """The first cause of why the group is broken, or None. Its ranks are those of the job."""
        return self.group.failure

    @property
    def seconds_waiting(self) -> float:
        """Seconds that calls of this group, and of those made of it, have spent blocked."""
        return self.group.seconds_waiting

    def counters(self) -> Counts:
        """Bytes, messages, operations, waiting and failures of this rank, of all its groups.

        The numbers are of the whole job, whichever of its groups is asked. Counting begins with the
        first call, whose numbers are zero, but for failures and kept bytes. From then on it costs
        an operation some microseconds. `Counts` says what is counted.
        """
        return self.engine.count()

    @property
    def progress(self) -> Progress:
        """The program's log of its steps, for those who watch the job: `log(step, loss=...)`.

        The same for all groups of a rank.
        """
        return self.engine.progress

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its host; in a group, that in the job."""
        return self.topology[: self.rank].count(self.topology[self.rank])

    @property
    def device(self) -> torch.device:
        """Where this rank's model belongs: accelerator number `local_rank`, if every rank of the
        host has one of its own (and sees all of them); else the CPU.
        """
        return device_of(self.local_rank, self.topology.count(self.topology[self.rank]))

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 alone, and at once. The options are those of Python's `print`."""
        if self.rank == 0:
            print(*values, **{"flush": True, **options})

    @property
    def registers_memory(self) -> bool:
        """True if ranks of this host see the memory from `empty`; else that is torch's own."""
        return self.shared is not None

    @property
    def has_background(self) -> bool:
        """True if works move on while nobody waits; False if only the rank's own thread may run."""
        return not self.engine.transport.single_thread

    @property
    def spares_a_processor(self) -> bool:
        """True if a collective gains from a thread that moves it on while this rank computes.

        Between hosts it does, and if a library has threads of its own. Inside a host the ranks'
        processors copy every byte, over TCP as in shared memory: there a thread only helps if the
        host has more processors than ranks. Else it takes turns with the computation.
        """
        if self.links.processors > self.world_size or self.native is not None:
            return True
        return len(set(self.topology)) > 1

    @property
    def forked(self) -> bool:
        """True if a rank forked this process: calls raise `MisuseError`, the end does nothing."""
        return self.engine.forked

    @property
    def finished(self) -> int:
        """Number of this group's collectives that are over on this rank."""
        return self.group.finished

    # Messages -------------------------------------------------------------------------------

    def send(
        self, data: Tensor | Buffer, dst: int, *, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send a tensor or buffer to rank `dst`; returns when its memory may be used again.

        The receiver need not have called `recv` yet. Messages to one rank with one tag arrive in
        order. Raises `InvalidRankError`, `SelfSendError`, `PeerLostError` and
        `CollectiveTimeoutError`. Moves the tensor's bytes once.
        """
        self.isend(data, dst, tag=tag, timeout=timeout, background=False).wait()

    def recv(
        self, into: Tensor | Buffer, src: int | None, *, tag: int = 0, timeout: float | None = None
    ) -> int:
        """Receive from rank `src` into a tensor or writable buffer, which is filled whole.

        `src=None` takes the first message with this tag, of any sender. Returns the sender.
        Raises `SizeMismatchError` if the message has another size than `into`, once it has come
        whole; it is dropped then. After a `CollectiveTimeoutError` the message is not lost: the
        next `recv` gets it. Bytes that have arrived are copied and kept, at any size; so it comes
        even if the timeouts of repeated calls are short. Also raises `InvalidRankError`,
        `SelfSendError` and `PeerLostError`.
        """
        return self.irecv(into, src, tag=tag, timeout=timeout, background=False).wait()

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
        dst, src = self.check_peer(dst), self.check_peer(src)
        outgoing = self._readable(data, "sendrecv")
        view, stand_in = self._writable(into, "sendrecv")
        round_ = Round(
            (SendBytes(dst, 0, len(outgoing)),), (ReceiveBytes(src, 0, len(view), buffer=1),)
        )
        self._message("sendrecv", dst, tag, round_, (outgoing, view), timeout).wait()
        if stand_in is not None:
            copy_bits(into.detach(), stand_in)

    def isend(
        self,
        data: Tensor | Buffer,
        dst: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        background: bool = True,
        stream: int = 0,
    ) -> Work[None]:
        """`send` that returns at once; the memory may be used again when the work is done.

        With `background` it moves on while nobody waits for it. Messages of different streams,
        which are multiples of 2^31, never mix.
        """
        dst = self.check_peer(dst)
        view = self._readable(data, "send")
        round_ = Round(sends=(SendBytes(dst, 0, len(view)),))
        return self._message(
            "send", dst, tag, round_, (view,), timeout, stream, background=background
        )

    def irecv(
        self,
        into: Tensor | Buffer,
        src: int | None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        background: bool = True,
        stream: int = 0,
    ) -> Work[int]:
        """`recv` that returns at once; `wait()` gives the sender, and `into` is filled then.

        Receives with one tag from one rank are served in the order in which they were posted. With
        `background` it moves on while nobody waits for it.
        """
        if src is not None:
            src = self.check_peer(src)
        elif self.world_size == 1:
            raise SelfSendError(
                f"rank {self.rank}: there is no other rank in this group to receive from",
                rank=self.rank,
            )
        view, stand_in = self._writable(into, "recv")
        peer = ANY if src is None else src
        step = Round(receives=(ReceiveBytes(peer, 0, len(view)),))

        def sender() -> int:
            if stand_in is not None:
                copy_bits(into.detach(), stand_in)
            return self.group.to_local[work.sender]

        work: Work[int] = self._message(
            "recv", peer, tag, step, (view,), timeout, stream, background=background, result=sender
        )
        return work

    def _readable(self, data: Tensor | Buffer, op: str) -> memoryview:
        """Return the bytes to send; of a device's tensor, a copy's, for which this thread waits."""
        if self._is_on_device(data, op):
            data = self.engine.copies_of(data.device, op).to_host(data)
        return readable_bytes(data)

    def _writable(self, into: Tensor | Buffer, op: str) -> tuple[memoryview, Tensor | None]:
        """Return the memory to receive in, and the tensor to copy to `into` at the end, if any."""
        if self._is_on_device(into, op):
            stand_in = self.engine.copies_of(into.device, op).room_for(into)
            return tensor_bytes(stand_in), stand_in
        if isinstance(into, Tensor):
            check_distinct(into)
        return writable_bytes(into)

    def _is_on_device(self, data: Tensor | Buffer, op: str) -> bool:
        """Return whether it is a tensor on a device. Raises unless it is a tensor or a buffer."""
        if isinstance(data, Tensor):
            self.check_movable(data, op)
            return not data.is_cpu
        try:
            memoryview(data)
        except TypeError:
            raise TypeError(
                f"rank {self.rank}: {op} takes a tensor, or a buffer such as bytes, not "
                f"{type(data).__name__}"
            ) from None
        return False

    def _message(
        self,
        name: str,
        peer: int,
        tag: int,
        round_: Round,
        buffers: tuple[memoryview, ...],
        timeout: float | None,
        stream: int = 0,
        *,
        background: bool = False,
        result: Callable[[], T] | None = None,
    ) -> Work[T]:
        if type(tag) is not int:
            tag = whole_number(tag, "tag")
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"tag must be between 0 and {MAX_TAG}, not {tag}")
        what = ""
        if tag or stream or peer == ANY:
            known = {f"tag {tag}": tag, "from any rank": peer == ANY, "an object": stream}
            what = ", ".join(name for name, is_so in known.items() if is_so)
        group, engine = self.group, self.engine
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        site = call_site()
        with engine.lock:
            number, now = group.next_message(name, peer), engine.now()
            call = Call(name, number, what, group.suffix, site, now, seconds)
            channel = Channel(group.id, Kind.POINT_TO_POINT, stream + tag)
            work = Work(group, call, channel, (round_,), buffers, result=result)
            group.issue(work)
        if background and not work.over:
            # Over TCP at once, as its receiver may be idle.
            waits = self.shares_memory and not self.spares_a_processor
            engine.transport.background(work, patience=PATIENCE if waits else 0.0)
        return work

    def wait_any(self, works: Sequence[Work[Any]], *, timeout: float = math.inf) -> None:
        """Block until one of some works of this rank is done, of any groups; see `wait_any`.

        Ranks are named in this group's numbers. ValueError if there are none.
        """
        if not works:
            raise ValueError(f"rank {self.rank}: wait_any of nothing would wait for ever")
        AnyOf(self.group, works, check_timeout(timeout)).wait()

    # Collectives ----------------------------------------------------------------------------

    def issue(
        self,
        name: str,
        program: Iterable[Program],
        buffers: Sequence[memoryview] = (),
        combine: Combine | None = None,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
        *,
        result: Callable[[], T] | None = None,
        background: bool = False,
    ) -> Work[T]:
        """Issue a collective: this rank's steps. Returns at once.

        Every rank of the group issues its own part, in the same order. `fingerprint` has to be
        equal on all of them. With `background` it moves on while nobody waits for it.
        """
        begun = self._begin(
            name, program, buffers, combine, signature, fingerprint, timeout, ASYNCHRONOUS, result
        )
        if type(begun) is Call:
            self.engine.transport.glance(begun.ended)  # nobody will wait for it, and look
            channel = Channel(self.group.id, Kind.COLLECTIVE, begun.sequence)
            work: Work[T] = Work(self.group, begun, channel, (), result=result)
            work.over = True
            return work
        work = cast("Work[T]", begun)
        if background and not work.over:
            patience = 0.0 if self.spares_a_processor else PATIENCE
            self.engine.transport.background(work, patience=patience)
        return work

    def run(
        self,
        name: str,
        program: Iterable[Program],
        buffers: Sequence[memoryview] = (),
        combine: Combine | None = None,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float | None = None,
    ) -> None:
        """`issue` a collective, and block until it is done."""
        begun: Work[None] | Call = self._begin(
            name, program, buffers, combine, signature, fingerprint, timeout, BLOCKING
        )
        if type(begun) is not Call:
            cast("Work[None]", begun).wait()

    def _begin(
        self,
        name: str,
        program: Iterable[Program],
        buffers: Sequence[memoryview],
        combine: Combine | None,
        signature: str,
        fingerprint: int,
        timeout: float | None,
        spin: Spin,
        result: Callable[[], T] | None = None,
    ) -> Work[T] | Call:
        """Begin a collective. Return the call alone if it is over already, else a work.

        If nothing is in the way, the caller carries out its steps itself (`Group.run_inline`).
        """
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        group, engine, site = self.group, self.engine, call_site()
        with engine.lock:
            now, before = engine.now(), group.checker.issued
            if spin is BLOCKING:
                engine.transport.glance(now)
            try:
                call = group.checker.next_call(name, signature, fingerprint, site, now, seconds)
                steps = group.run_inline(call, iter(program), spin)
                if steps is None:
                    return call
                channel = Channel(group.id, Kind.COLLECTIVE, call.sequence)
                work = Work(group, call, channel, steps, buffers, combine=combine, result=result)
                work.step = call.step  # it has begun
                group.issue(work)
                call.step = None
            except BaseException as error:
                group.interrupted(error, before)
                raise
        return work

    def barrier(self, *, label: str = "", timeout: float | None = None) -> None:
        """Wait until every rank of the group has called this, with the same label.

        2p messages of no bytes; in shared memory, one look at each other's flags; or the library's
        own.
        """
        self.run("barrier", self._barrier_steps(), (), None, *_signed(label), timeout)

    def mark(self, what: str) -> None:
        """Say that every rank of the group does this here. Sends nothing, and waits for nobody.

        The next collective of the group tells of it: if a rank has left it out, `DesyncError` says
        so on every rank.
        """
        with self.engine.lock:
            self.group.checker.mark(what)

    def ibarrier(
        self, *, label: str = "", timeout: float | None = None, background: bool = True
    ) -> Work[None]:
        """`barrier` that returns at once; when the work is done, every rank has come."""
        arguments = self._barrier_steps(), (), None, *_signed(label), timeout
        return self.issue("barrier", *arguments, background=background)

    def _barrier_steps(self) -> Iterable[Program]:
        if self.shared is not None and self.shares_memory:
            return self.shared.barrier()
        # A library's own may be faster, but this compares what the ranks do.
        return ring_barrier(self.rank, self.world_size)

    # Groups and memory ----------------------------------------------------------------------

    def subgroup(self, members: Iterable[int]) -> SubBackend:
        """Return a backend for some of this one's ranks. Each of them calls this; sends nothing."""
        return SubBackend(self, members)

    def empty(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return an uninitialized tensor in memory that this backend sends without a copy.

        device   where it is, the processor's memory by default; on another one it is torch's own
        """
        if device is not None and torch.device(device).type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        return self.engine.transport.alloc(shape, dtype)

    def common(
        self, count: int, dtype: torch.dtype = torch.float32, *, timeout: float | None = None
    ) -> Tensor | None:
        """Return memory that all ranks of the group have in common, `count` elements, all zero.

        The others see a rank's writes after the next barrier, or after another collective of the
        group in which they wait for that rank. Callers agree on the order of their writes: nothing
        else ever reads or writes it.

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
        rank, count = self.rank, index(count)
        if count < 0:
            raise ValueError(f"rank {rank}: there is no memory of {count} elements")
        if timeout is not None:
            check_timeout(timeout)
        transport = self.engine.transport
        if len(set(self.topology)) > 1:
            return None
        alone = self.world_size == 1 or self.group.closed  # `issue` refuses it then
        source = Own() if alone else transport.common(self.group)
        if source is None:
            return None
        memory = CommonMemory(source, rank, self.world_size, count * dtype.itemsize)
        signature = f"{str(dtype).removeprefix('torch.')} [{count}]"
        try:
            work: Work[None] = self.issue(
                "common",
                memory.steps(),
                memory.buffers(),
                signature=signature,
                fingerprint=xxh3_64_intdigest(f"common {signature}".encode()),
                timeout=timeout,
            )
            work.wait()
            return memory.tensor(work, count, dtype)
        finally:
            memory.close()

    # Checks before anything is sent ---------------------------------------------------------

    def check_rank(self, rank: int, what: str = "rank") -> int:
        """Return `rank` as an int, of any integer; `InvalidRankError` unless the group has it."""
        if type(rank) is int and 0 <= rank < self.world_size:
            return rank
        try:
            number: int | None = index(rank)
        except TypeError:
            number = None
        if number is None or not 0 <= number < self.world_size:
            raise InvalidRankError(
                f"rank {self.rank}: {what} {rank!r} is not one of the {self.world_size} ranks "
                f"0 to {self.world_size - 1}",
                rank=self.rank,
                peer=number,
            )
        return number

    def check_peer(self, peer: int) -> int:
        """Do so for the other side of a message; `SelfSendError` for this rank itself."""
        peer = self.check_rank(peer, "peer")
        if peer == self.rank:
            raise SelfSendError(
                f"rank {self.rank}: a message to or from itself would wait for itself; "
                "copy the tensor instead",
                rank=self.rank,
                peer=peer,
            )
        return peer

    def check_movable(self, tensor: Tensor, op: str) -> None:
        """Raise `UnsupportedOperationError` unless it is dense, on a device of this backend."""
        problem = why_not_movable(tensor, self.devices)
        if problem is not None:
            places = " and ".join(sorted(device.upper() for device in self.devices))
            raise UnsupportedOperationError(
                f"rank {self.rank}: {op} moves dense {places} tensors and was given {problem}",
                rank=self.rank,
                op=op,
            )

    # The end --------------------------------------------------------------------------------

    def lost(self) -> dict[int, str]:
        """Return the ranks of the group that are gone, and why. Waits for nothing.

        Looks at the connections, and at the processes of this host. So it also tells of ranks that
        were lost after the group was broken. A rank that has left in good order is among them.
        """
        engine, group = self.engine, self.group
        with engine.lock:
            engine.transport.check_peers()
            leavers = engine.left | group.left
            left = {rank: f"rank {group.name_of_global(rank)} left" for rank in leavers}
            lost = {rank: failure.reason for rank, failure in engine.lost.items()}
            gone = left | lost
            return {local: gone[rank] for local, rank in enumerate(group.ranks) if rank in gone}

    def silent(self) -> list[int]:
        """Return the ranks of the group that were not heard for a while. Waits for nothing.

        Those in `lost()`, too, were given up for it, and are cut off from here; the others may be.
        """
        with self.engine.lock:
            silent = set(self.engine.transport.silent())
            return [local for local, rank in enumerate(self.group.ranks) if rank in silent]

    def fail(self, error: DistributedError, *, culprit: int | None = None) -> None:
        """Break the group on every rank because of an error of this one, which raises it itself.

        For code above the collectives that finds out, between two of them, that this rank cannot
        go on: the others wait for it, and this tells them why it will not come. They blame the
        error's `peer`, or else this rank; or `culprit`, a global rank that need not be a member.
        """
        if self.forked:
            return
        with self.engine.lock:
            if self.engine.closed:  # the others know already that this rank left, or was lost
                return
            ranks, blamed = self.group.ranks, self.rank if error.peer is None else error.peer
            if culprit is None:
                culprit = ranks[blamed]
            self.group.fail(Failure(type(error), culprit, ranks[self.rank], str(error)))
            self.engine.run_ready()

    def bind(self, other: Backend) -> None:
        """Let a failure of one of these groups break the other one, too, from now on: their members
        wait for each other. Nothing is sent until then.
        """
        with self.engine.lock:
            for one, its in ((self.group, other.group), (other.group, self.group)):
                one.bound.append(its)
                if one.failure is not None:
                    its.fail(one.failure)

    def close(self) -> None:
        """Leave: peers that wait for this rank are told so. Bounded in time; may be repeated."""
        if self.forked:
            return
        with self.engine.lock:
            if not self.group.closed:
                self.group.close()
                if self.native is not None:
                    self.native.close()
                self.engine.transport.tell_members(self.group, None)
                self.engine.run_ready()

    def abort(self) -> None:
        """Leave at once: to the others this rank is lost, and the group is broken."""
        if self.forked:
            return
        with self.engine.lock:
            group = self.group
            if not group.closed:
                here = group.ranks[group.rank]
                reason = f"rank {group.name_of(group.rank)} was lost: it aborted"
                group.close()
                failure = Failure(PeerLostError, here, here, reason)
                self.engine.transport.tell_members(group, failure.notice())
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


def _signed(label: str) -> tuple[str, int]:
    """Return the signature and the fingerprint of a barrier."""
    return label, xxh3_64_intdigest(label.encode()) if label else 0


# ------------------------------------------------------------------------------
# `SubBackend`: some of a backend's ranks, as a group of their own.


class SubBackend(Backend):
    """Some ranks of `parent`, renumbered from 0 in the order of their ranks there.

    parent    the backend that it is part of; may itself be a `SubBackend`
    members   sorted and without repeats, as ranks of `parent`
    in_order  renumbered in the order in which they are given instead
    timeout   by default the parent's

    Every member makes it, in the same order among groups of the same members; nothing is sent.
    It moves bytes over its parent's connections, but neither waits for the parent's works
    nor mixes with them. Closing it leaves the parent open.

    Raises `InvalidWorldSizeError` for no members; `InvalidRankError` if one is not a rank of the
    parent, or the caller is not among them.
    """

    def __init__(
        self,
        parent: Backend,
        members: Iterable[int],
        *,
        in_order: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.parent = parent
        if not isinstance(members, Iterable):
            raise TypeError(f"rank {parent.rank}: members is a list of ranks, not {members!r}")
        listed = [parent.check_rank(member, "member") for member in members]
        self.members = tuple(dict.fromkeys(listed) if in_order else sorted(set(listed)))
        if not self.members:
            raise InvalidWorldSizeError(
                f"rank {parent.rank}: a group needs at least one member", rank=parent.rank
            )
        if parent.rank not in self.members:
            raise InvalidRankError(
                f"rank {parent.rank} makes a group of ranks {list(self.members)} without being one "
                "of them: only members make a group",
                rank=parent.rank,
            )
        ranks = tuple(parent.group.ranks[member] for member in self.members)
        engine = parent.engine
        with engine.lock:
            group = parent.group.child(ranks)
        super().__init__(engine, group, timeout=parent.timeout if timeout is None else timeout)
        self.devices = parent.devices
        self.links = parent.links
        self.topology = tuple(parent.topology[member] for member in self.members)

    @property
    @override
    def local_rank(self) -> int:
        return self.parent.local_rank

    @property
    @override
    def device(self) -> torch.device:
        return self.parent.device

    def to_global(self, local: int) -> int:
        """Return the parent's number for rank `local` of this group."""
        self.check_rank(local)
        return self.members[local]

    def to_local(self, global_: int) -> int | None:
        """Return this group's number for rank `global_` of the parent; None if it is no member."""
        return self.members.index(global_) if global_ in self.members else None
