"""`ProcessGroupLibrary`: a process group of torch's, as a library."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor
from typing_extensions import override

from phalanx.core.steps import Call
from phalanx.errors import UnsupportedOperationError
from phalanx.native.base import Abilities, Handle, Library
from phalanx.native.torch_group import GroupKind

ProcessGroup = Any  # torch.distributed.ProcessGroup, or one of its backends
END_WITHIN = 1.0  # seconds for each thread that waited for a message, once the group is at its end


class Former(Protocol):
    """Makes groups of some of the ranks."""

    def form(self, members: Sequence[int], ident: int, timeout: float) -> ProcessGroup:
        """The group of these ranks; `ident` says which. Blocks until all of them form it."""
        ...

    def stop(self) -> None:
        """Let go whoever waits for others to form a group."""
        ...


class ProcessGroupLibrary(Library):
    """A process group of torch's.

    kinds   for each kind of device, what such groups can do
    owned   whether it was made here: then it is ended here, too
    former  makes groups of some of the ranks; None where that cannot be
    """

    def __init__(
        self,
        group: ProcessGroup,
        kinds: Mapping[str, GroupKind],
        *,
        owned: bool,
        former: Former | None = None,
    ) -> None:
        super().__init__()
        self.name = " and ".join(dict.fromkeys(kind.title for kind in kinds.values()))
        self.rank, self.size = group.rank(), group.size()
        self.can = Abilities(
            devices=frozenset(kinds),
            subgroups=former is not None,
            ordered=any(kind.on_stream for kind in kinds.values()),
            calls_back=True,
        )
        self._group = group
        self._kinds = kinds
        self._on_cpu = kinds.get("cpu")
        self._first_kind = next(iter(kinds.values()))
        self._owned = owned
        self._former = former
        self._waiters = Waiters(f"phalanx rank {self.rank}: {self.name}", self._tell)
        self._ended = False

    def _kind(self, call: Call) -> GroupKind | None:
        tensor = call.source if call.source is not None else call.out
        if tensor is None:
            return self._first_kind
        return self._on_cpu if tensor.is_cpu else self._kinds.get(tensor.device.type)

    def _tell(self) -> None:
        self.news()

    @override
    def has(self, call: Call) -> bool:
        kind = self._kind(call)
        return kind is not None and kind.has(call)

    @override
    def collective(self, call: Call) -> Handle:
        kind = self._kind(call)
        assert kind is not None
        work, finish = EMPTY_HASH[call.collective](self._group, call, kind)
        return (StreamWork if kind.on_stream else CollectiveWork)(work, finish)

    @override
    def send(self, view: memoryview, peer: int, tag: int) -> Handle:
        tensor = _as_tensor(view)
        handle = MessageWork(tensor)
        self._waiters.wait_for(handle, self._group.send([tensor], peer, tag))
        return handle

    @override
    def recv(self, view: memoryview, peer: int, tag: int) -> Handle:
        tensor = _as_tensor(view)
        handle = MessageWork(tensor)
        self._waiters.wait_for(handle, self._group.recv([tensor], peer, tag))
        return handle

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        if self._former is None:
            raise UnsupportedOperationError(
                f"rank {self.rank}: this process group has no store through which some of its "
                "ranks could form one of their own",
                rank=self.rank,
            )
        group = self._former.form(members, ident, timeout)
        return ProcessGroupLibrary(group, self._kinds, owned=True)

    @override
    def close(self) -> None:
        if self._former is not None:
            self._former.stop()
        self.abort()
        if self._owned:
            self._waiters.end(END_WITHIN)
            with suppress(RuntimeError):
                self._group.shutdown()
        self._group = None

    @override
    def abort(self) -> None:
        if self._ended or not self._owned:
            return
        self._ended = True
        for kind in self._kinds.values():
            if kind.break_off is not None:
                kind.break_off(self._group)


def _as_tensor(view: memoryview) -> Tensor:
    """The bytes as a tensor. Torch warns of read-only memory, which is only read here: a copy."""
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


# ------------------------------------------------------------------------------
# How each collective is started on a process group of torch's.
#
# Each row takes the group and the call, and gives torch's `Work` and what is to be done when that
# is over. Reductions work in place, so that what is given is copied to where the result will be.

dist: Any = torch.distributed  # of which builds of torch have more or less
Started = tuple[Any, "Callable[[], object] | None"]


def _all_reduce(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    assert call.out is not None
    values = _in_place(call)
    work = group.allreduce([values], _reduction(dist.AllreduceOptions(), call, kind))
    return work, _mean(values, group, call, kind)


def _reduce(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    # Also on ranks that get no result it works in place.
    assert call.source is not None
    values = _in_place(call) if group.rank() == call.root else call.source.clone()
    options = _reduction(dist.ReduceOptions(), call, kind)
    options.rootRank = call.root
    finish = _mean(values, group, call, kind) if group.rank() == call.root else None
    return group.reduce([values], options), finish


def _reduce_scatter(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    source, out = call.source, call.out
    assert source is not None
    assert out is not None
    if kind.on_stream:
        options = _reduction(dist.ReduceScatterOptions(), call, kind)
        return group._reduce_scatter_base(out.view(-1), source.view(-1), options), None
    # As Gloo itself does it, but with a work that can be asked whether it is over.
    values = source.reshape(group.size(), -1).clone()
    work = group.allreduce([values], _reduction(dist.AllreduceOptions(), call, kind))
    mean = _mean(out, group, call, kind)

    def finish() -> None:
        out.view(-1).copy_(values[group.rank()])
        if mean is not None:
            mean()

    return work, finish


def _broadcast(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    options = dist.BroadcastOptions()
    options.rootRank = call.root
    values = _in_place(call) if group.rank() == call.root else call.out
    assert values is not None
    return group.broadcast([_bits(values)], options), None


def _all_gather(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    assert call.out is not None
    return group._allgather_base(_bits(call.out), _bits(call.source)), None


def _gather(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    options = dist.GatherOptions()
    options.rootRank = call.root
    rows = [] if call.out is None else [_rows(call.out, group)]
    return group.gather(rows, [_bits(call.source)], options), None


def _scatter(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    options = dist.ScatterOptions()
    options.rootRank = call.root
    rows = [] if call.source is None else [_rows(call.source, group)]
    return group.scatter([_bits(call.out)], rows, options), None


def _all_to_all(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    return group.alltoall_base(_bits(call.out), _bits(call.source), [], []), None


def _barrier(group: ProcessGroup, call: Call, kind: GroupKind) -> Started:
    return group.barrier(), None


EMPTY_HASH: Mapping[str, Callable[[ProcessGroup, Call, GroupKind], Started]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "reduce_scatter": _reduce_scatter,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "gather": _gather,
        "scatter": _scatter,
        "all_to_all": _all_to_all,
        "barrier": _barrier,
    }
)


def _in_place(call: Call) -> Tensor:
    """Where the result goes, with what this rank gives in it."""
    source, out = call.source, call.out
    if out is None:
        assert source is not None
        return source
    if source is not None and source is not out and source.data_ptr() != out.data_ptr():
        out.copy_(source)
    return out


def _bits(tensor: Tensor | None) -> Tensor:
    """The tensor as bytes, of which every group can move any number."""
    assert tensor is not None
    # Of one element, also a tensor with another stride is contiguous.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat if tensor.dtype is torch.float32 else flat.view(torch.uint8)


def _rows(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """One part for each rank."""
    return list(_bits(tensor).view(group.size(), -1).unbind(0))


_OPS: Mapping[str, Any] = MappingProxyType(
    {
        "sum": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "product": dist.ReduceOp.PRODUCT,
        "band": dist.ReduceOp.BAND,
        "bor": dist.ReduceOp.BOR,
        "bxor": dist.ReduceOp.BXOR,
    }
)


def _reduction(options: Any, call: Call, kind: GroupKind) -> Any:
    assert call.op is not None
    if call.op != "sum":  # which it is by default
        average = call.op == "mean" and kind.averages
        options.reduceOp = dist.ReduceOp.AVG if average else _OPS[call.op]
    return options


def _mean(
    values: Tensor, group: ProcessGroup, call: Call, kind: GroupKind
) -> Callable[[], object] | None:
    """Of a sum that is to be a mean: what makes it one."""
    if call.op != "mean" or kind.averages:
        return None
    if values.dtype.is_floating_point:
        return lambda: values.div_(group.size())
    return lambda: values.div_(group.size(), rounding_mode="trunc")


# ------------------------------------------------------------------------------
# Handles on what torch has under way: its `Work` objects.

Work = Any  # torch.distributed.Work, which builds without distributed support lack
FOREVER = timedelta(days=3650)


class CollectiveWork(Handle):
    """A collective of a process group, and what is to be done with what it leaves.

    finish   called once, when it is over, by the thread that finds out; None: nothing
    """

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Work, finish: Callable[[], object] | None) -> None:
        self._work: Work | None = work
        self._finish = finish

    @override
    def done(self) -> bool:
        work = self._work
        if work is not None:
            if not work.is_completed():
                return False
            work.wait()  # raises what went wrong
            self._end()
        return True

    @override
    def wait(self, seconds: float) -> bool:
        work = self._work
        if work is not None:
            try:
                # Whole milliseconds; none would mean that it waits as long as it takes.
                work.wait(timedelta(0, 0, 0, int(seconds * 1e3) or 1))
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # it has failed, or ended just now
            self._end()
        return True

    def _end(self) -> None:
        self._work = None
        if self._finish is not None:
            self._finish()


class StreamWork(CollectiveWork):
    """A collective on a device."""

    __slots__ = ()
    on_stream = True

    @override
    def wait(self, seconds: float) -> bool:
        work = self._work
        if work is not None:
            work.wait()
            self._end()
        return True


class MessageWork(Handle):
    """A message, for whose end a thread of `Waiters` waits: torch does not say it otherwise."""

    __slots__ = ("_error", "_over", "memory")

    def __init__(self, memory: object) -> None:
        self.memory = memory  # kept alive until it is over
        self._over = threading.Event()
        self._error: Exception | None = None

    def see_through(self, work: Work) -> None:
        """Block until the message is over."""
        try:
            work.wait(FOREVER)
        except Exception as error:  # raised where the handle is asked
            self._error = error
        self._over.set()

    @override
    def done(self) -> bool:
        if not self._over.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    @override
    def wait(self, seconds: float) -> bool:
        self._over.wait(seconds)
        return self.done()


class Waiters:
    """Threads that wait for messages: as many as there have been messages at a time."""

    def __init__(self, name: str, news: Callable[[], None]) -> None:
        self._name = name
        self._news = news
        self._tasks: queue.SimpleQueue[tuple[MessageWork, Work] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def wait_for(self, handle: MessageWork, work: Work) -> None:
        """Have the handle learn when the work is over."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._tasks.put((handle, work))

    def end(self, seconds: float) -> None:
        """Let the threads end, those that wait when what they wait for has ended."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            handle, work = task
            handle.see_through(work)
            del work, task, handle
            self._news()
            with self._lock:
                self._idle += 1
