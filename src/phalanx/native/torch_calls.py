"""`ProcessGroupLibrary`: a process group of torch's, as a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor
from typing_extensions import override

from phalanx.core.steps import NativeCall
from phalanx.errors import UnsupportedOperationError
from phalanx.native.base import Abilities, Handle, Library

ProcessGroup = Any  # torch.distributed.ProcessGroup, or one of its backends


class GroupFormer(Protocol):
    """Makes groups of some of the ranks."""

    def form(self, members: Sequence[int], ident: int, timeout: float) -> ProcessGroup:
        """The group of these ranks; `ident` says which. Blocks until all of them form it."""
        ...

    def stop(self) -> None:
        """Release the threads that wait for other ranks to form a group."""
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
        former: GroupFormer | None = None,
    ) -> None:
        self.name = " and ".join(dict.fromkeys(kind.title for kind in kinds.values()))
        self.rank, self.size = group.rank(), group.size()
        self.can = Abilities(
            devices=frozenset(kinds),
            subgroups=former is not None,
            on_stream=any(kind.on_stream for kind in kinds.values()),
        )
        self._group = group
        self._kinds = kinds
        self._on_cpu = kinds.get("cpu")
        self._first_kind = next(iter(kinds.values()))
        self._owned = owned
        self._former = former
        self._ended = False

    def _kind(self, call: NativeCall) -> GroupKind | None:
        tensor = call.source if call.source is not None else call.out
        if tensor is None:
            return self._first_kind
        return self._on_cpu if tensor.is_cpu else self._kinds.get(tensor.device.type)

    @override
    def has(self, call: NativeCall) -> bool:
        kind = self._kind(call)
        return kind is not None and kind.has(call)

    @override
    def collective(self, call: NativeCall) -> Handle:
        kind = self._kind(call)
        assert kind is not None
        work, finish = STARTERS[call.collective](self._group, call, kind)
        return (StreamWork if kind.on_stream else CollectiveWork)(work, finish)

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
        if self._owned and self._group is not None:
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


# ------------------------------------------------------------------------------
# How each collective is started on a process group of torch's.
#
# Each row takes the group and the call, and gives torch's `Work` and what is to be done when that
# is over. Reductions work in place, so the input is copied to the result's memory first.

dist: Any = torch.distributed  # of which builds of torch have more or less
Started = tuple[Any, "Callable[[], object] | None"]


def _all_reduce(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
    assert call.out is not None
    values = _in_place(call)
    work = group.allreduce([values], _reduction(dist.AllreduceOptions(), call, kind))
    return work, _mean(values, group, call, kind)


def _reduce(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
    # It works in place on ranks without a result, too.
    assert call.source is not None
    values = _in_place(call) if group.rank() == call.root else call.source.clone()
    options = _reduction(dist.ReduceOptions(), call, kind)
    options.rootRank = call.root
    finish = _mean(values, group, call, kind) if group.rank() == call.root else None
    return group.reduce([values], options), finish


def _reduce_scatter(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
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


def _broadcast(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
    options = dist.BroadcastOptions()
    options.rootRank = call.root
    values = _in_place(call) if group.rank() == call.root else call.out
    assert values is not None
    return group.broadcast([_bits(values)], options), None


def _all_gather(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
    assert call.out is not None
    return group._allgather_base(_bits(call.out), _bits(call.source)), None


def _gather(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
    options = dist.GatherOptions()
    options.rootRank = call.root
    rows = [] if call.out is None else [_rows(call.out, group)]
    return group.gather(rows, [_bits(call.source)], options), None


def _scatter(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
    options = dist.ScatterOptions()
    options.rootRank = call.root
    rows = [] if call.source is None else [_rows(call.source, group)]
    return group.scatter([_bits(call.out)], rows, options), None


def _all_to_all(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
    return group.alltoall_base(_bits(call.out), _bits(call.source), [], []), None


def _barrier(group: ProcessGroup, call: NativeCall, kind: GroupKind) -> Started:
    return group.barrier(), None


STARTERS: Mapping[str, Callable[[ProcessGroup, NativeCall, GroupKind], Started]] = MappingProxyType(
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


def _in_place(call: NativeCall) -> Tensor:
    """The result's memory, with this rank's input in it."""
    source, out = call.source, call.out
    if out is None:
        assert source is not None
        return source
    if source is not None and source is not out and source.data_ptr() != out.data_ptr():
        out.copy_(source)
    return out


def _bits(tensor: Tensor | None) -> Tensor:
    """The tensor as bytes, a dtype that every group can move."""
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


def _reduction(options: Any, call: NativeCall, kind: GroupKind) -> Any:
    assert call.op is not None
    if call.op != "sum":  # which it is by default
        average = call.op == "mean" and kind.averages
        options.reduceOp = dist.ReduceOp.AVG if average else _OPS[call.op]
    return options


def _mean(
    values: Tensor, group: ProcessGroup, call: NativeCall, kind: GroupKind
) -> Callable[[], object] | None:
    """What turns a sum into a mean, if the call asks for one."""
    if call.op != "mean" or kind.averages:
        return None
    if values.dtype.is_floating_point:
        return lambda: values.div_(group.size())
    return lambda: values.div_(group.size(), rounding_mode="trunc")


# ------------------------------------------------------------------------------
# Handles on torch's `Work` objects.

Work = Any  # torch.distributed.Work, which builds without distributed support lack
FOREVER = timedelta(days=3650)


class CollectiveWork(Handle):
    """A collective of a process group, and what is done with its result afterwards.

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


# ------------------------------------------------------------------------------
# What each kind of process group can do, as data.
#
# A collective that is not in the table, or whose result would not be what `ReduceOp` promises, is
# done with rounds of messages instead.

MOVING = frozenset({"broadcast", "all_gather", "gather", "scatter", "all_to_all"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ALL = MOVING | REDUCING | {"barrier"}

_FLOATS = frozenset({torch.float32, torch.float64})
_SHORT = frozenset({torch.float16, torch.bfloat16})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})


@dataclass(frozen=True)
class GroupKind:
    """One kind of process group, on one kind of device.

    title        its name, for messages
    collectives  those that it has
    dtypes       for each reduction, the dtypes that it computes as `ReduceOp` promises
    on_stream    whether its collectives run on a device's stream
    averages     whether it computes means itself, instead of sums
    break_off    ends at once all that is under way in a group; None: nothing does
    """

    title: str
    collectives: frozenset[str]
    dtypes: Mapping[str, frozenset[torch.dtype]]
    on_stream: bool = False
    averages: bool = False
    break_off: Callable[[ProcessGroup], None] | None = None

    def has(self, call: NativeCall) -> bool:
        """Whether groups of this kind carry out such a collective."""
        collective, source, out, op, _ = call
        if collective not in REDUCING:
            return collective in self.collectives
        tensor = source if source is not None else out
        assert tensor is not None
        assert op is not None
        return tensor.dtype in self.dtypes.get(op, ()) and collective in self.collectives


def _break_off_gloo(group: ProcessGroup) -> None:
    """A receive that times out makes Gloo close the connections to all peers."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # it says so; or the peer has closed, and the next may do
                group.recv([torch.empty(1)], peer, _NOBODYS).wait(timedelta(milliseconds=1))


_NOBODYS = 2  # a tag that no message uses


_ALL_NUMBERS = _FLOATS | _SHORT | _WHOLE

# Gloo's minimum and maximum of NaN and a number are either; its sum of many float16 may overflow
# where their mean does not.
GLOO = GroupKind(
    title="Gloo",
    collectives=ALL,
    dtypes=MappingProxyType(
        {
            "sum": _ALL_NUMBERS,
            "mean": _ALL_NUMBERS - {torch.float16},
            "product": _ALL_NUMBERS,
            **dict.fromkeys(("min", "max", "band", "bor", "bxor"), _WHOLE),
        }
    ),
    break_off=_break_off_gloo,
)

NCCL = GroupKind(
    title="NCCL",
    collectives=ALL,
    dtypes=MappingProxyType(dict.fromkeys(("sum", "mean", "product", "min", "max"), _ALL_NUMBERS)),
    on_stream=True,
    averages=True,
)

_UCC_COLLECTIVES = frozenset({"all_reduce", "broadcast", "all_gather", "all_to_all", "barrier"})
_UCC_DTYPES = MappingProxyType(dict.fromkeys(("sum", "mean"), _FLOATS | {torch.int32, torch.int64}))
UCC = GroupKind(title="UCC", collectives=_UCC_COLLECTIVES, dtypes=_UCC_DTYPES)
UCC_ON_CUDA = GroupKind(
    title="UCC", collectives=_UCC_COLLECTIVES, dtypes=_UCC_DTYPES, on_stream=True
)

# What any group can be expected to do.
OTHER = GroupKind(
    title="the process group",
    collectives=frozenset({"all_reduce", "broadcast", "barrier"}),
    dtypes=MappingProxyType(dict.fromkeys(("sum", "mean"), _FLOATS)),
)

KINDS: Mapping[tuple[str, str], GroupKind] = MappingProxyType(
    {
        ("gloo", "cpu"): GLOO,
        ("nccl", "cuda"): NCCL,
        ("ucc", "cpu"): UCC,
        ("ucc", "cuda"): UCC_ON_CUDA,
    }
)
"""By torch's name for the backend, and the device."""


def kinds_of(group: ProcessGroup) -> Mapping[str, GroupKind]:
    """For each kind of device that a group takes tensors of, what it does with them."""
    devices = getattr(group, "_device_types", None)
    if devices is None:  # one of a process group's backends, without the process group
        name = group.name()
        known = {device: kind for (n, device), kind in KINDS.items() if n == name}
        return MappingProxyType(known or {"cpu": OTHER})
    kinds: dict[str, GroupKind] = {}
    for device in devices:
        name = group._get_backend(device).name()
        if (name, device.type) in KINDS:
            kinds[device.type] = KINDS[name, device.type]
        elif not any(name == known for known, _ in KINDS):
            kinds[device.type] = OTHER
    return MappingProxyType(kinds)
