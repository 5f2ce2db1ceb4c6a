"""`ProcessGroupLibrary`: a process group of torch's, as a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.reduce_op import ReduceOp, divide_
from phalanx.core.steps import NativeCall
from phalanx.native.base import Handle, Library
from phalanx.native.torch_formation import FORMED, GroupFormer, ProcessGroup, Store, dist

Work = Any  # torch.distributed.Work, which builds without distributed support lack

# ------------------------------------------------------------------------------
# The capabilities of each kind of process group, as data.
#
# A collective that is not in the table, or whose result would not be what `ReduceOp` promises, is
# done with rounds of messages instead.

_MOVING = frozenset({"broadcast", "all_gather", "gather", "scatter", "all_to_all"})
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})

_FLOATS = frozenset({torch.float32, torch.float64})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_NUMBERS = _FLOATS | {torch.float16, torch.bfloat16} | _WHOLE


@dataclass(frozen=True)
class GroupKind:
    """One kind of process group, on one kind of device.

    title        its name, for messages
    dtypes       for each reduction, the dtypes that it computes as `ReduceOp` promises
    collectives  the names of its collectives
    on_stream    whether its collectives run on a device's stream
    averages     whether it computes means itself, instead of sums
    break_off    ends all pending calls of a group at once; None: nothing does
    """

    title: str
    dtypes: Mapping[ReduceOp, frozenset[torch.dtype]]
    collectives: frozenset[str] = _MOVING | _REDUCING
    on_stream: bool = False
    averages: bool = False
    break_off: Callable[[ProcessGroup], None] | None = None

    def has(self, call: NativeCall) -> bool:
        """Return whether groups of this kind carry out such a collective."""
        collective, source, _, op, _ = call
        if op is None or collective not in self.collectives:
            return collective in self.collectives
        assert source is not None
        return source.dtype in self.dtypes.get(op, ())


def _break_off_gloo(group: ProcessGroup) -> None:
    """Close the connections to all peers, by a receive that times out."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # it says so; or the peer has closed, and the next may do
                group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))


# Gloo's minimum and maximum of NaN and a number are either; its sum of many float16 may overflow
# though their mean does not.
_GLOO_DTYPES = dict.fromkeys(ReduceOp, _WHOLE) | {
    ReduceOp.SUM: _NUMBERS,
    ReduceOp.MEAN: _NUMBERS - {torch.float16},
    ReduceOp.PRODUCT: _NUMBERS,
}
_NCCL_OPS = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_UCC = GroupKind(
    "UCC",
    dict.fromkeys((ReduceOp.SUM, ReduceOp.MEAN), _FLOATS | {torch.int32, torch.int64}),
    frozenset({"all_reduce", "broadcast", "all_gather", "all_to_all"}),
)
# The capabilities of any group.
OTHER = GroupKind(
    "the process group",
    dict.fromkeys((ReduceOp.SUM, ReduceOp.MEAN), _FLOATS),
    frozenset({"all_reduce", "broadcast"}),
)

KINDS: Mapping[str, Mapping[str, GroupKind]] = MappingProxyType(
    {
        "gloo": {"cpu": GroupKind("Gloo", _GLOO_DTYPES, break_off=_break_off_gloo)},
        "nccl": {
            "cuda": GroupKind(
                "NCCL", dict.fromkeys(_NCCL_OPS, _NUMBERS), on_stream=True, averages=True
            )
        },
        "phalanx": {"cpu": GroupKind("Phalanx", dict.fromkeys(ReduceOp, _NUMBERS))},
        "ucc": {"cpu": _UCC, "cuda": replace(_UCC, on_stream=True)},
    }
)
"""By torch's name for the backend, and the device."""


def kinds_of(group: ProcessGroup) -> Mapping[str, GroupKind]:
    """Return the kind of a group on each kind of device that it takes tensors of."""
    devices = getattr(group, "_device_types", None)
    if devices is None:  # one of a process group's backends, without the process group
        return KINDS.get(group.name(), {"cpu": OTHER})
    kinds: dict[str, GroupKind] = {}
    for device in devices:
        known = KINDS.get(group._get_backend(device).name(), {device.type: OTHER})
        if device.type in known:
            kinds[device.type] = known[device.type]
    return kinds


# ------------------------------------------------------------------------------
# How each collective is started on a process group of torch's.

_OPS: Mapping[ReduceOp, Any] = MappingProxyType(
    {op: getattr(dist.ReduceOp, "SUM" if op is ReduceOp.MEAN else op.name) for op in ReduceOp}
)


def start_reduction(
    group: ProcessGroup, call: NativeCall, kind: GroupKind
) -> tuple[Work, Callable[[], object] | None]:
    """Start a reduction: return torch's `Work`, and the function to run when it is over.

    Reductions work in place, so the input is copied to the result's memory first.
    """
    name, source, out, op, root = call
    assert source is not None
    assert op is not None
    rank, size = group.rank(), group.size()
    averages = op is ReduceOp.MEAN and kind.averages
    divides = op is ReduceOp.MEAN and not kind.averages
    theirs = dist.ReduceOp.AVG if averages else _OPS[op]
    if name == "reduce_scatter":
        assert out is not None
        if kind.on_stream:
            options = dist.ReduceScatterOptions()
            options.reduceOp = theirs
            return group._reduce_scatter_base(out.view(-1), source.view(-1), options), None
        # An all-reduce, as Gloo itself does it, but with a work that can be asked whether it is
        # over.
        rows = source.reshape(size, -1).clone()

        def finish() -> None:
            out.view(-1).copy_(rows[rank])
            if divides:
                divide_(out, size)

        return group.allreduce([rows], theirs), finish
    if name == "reduce":  # which works in place on ranks without a result, too
        values = _in_place(source, out) if rank == root else source.clone()
        work = group.reduce(values, root, theirs)
    else:
        values = _in_place(source, out)
        work = group.allreduce([values], theirs)
    return work, partial(divide_, values, size) if divides else None


def start_move(group: ProcessGroup, call: NativeCall) -> Work:
    """Start a collective that moves bytes."""
    name, source, out, _, root = call
    match name:
        case "broadcast":
            values = _in_place(source, out) if group.rank() == root else out
            return group.broadcast(_bits(values), root)
        case "all_gather":
            return group._allgather_base(_bits(out), _bits(source))
        case "gather":
            rows = [] if out is None else _rows(out, group)
            return group.gather(rows, _bits(source), root)
        case "scatter":
            rows = [] if source is None else _rows(source, group)
            return group.scatter(_bits(out), rows, root)
        case _:
            return group.alltoall_base(_bits(out), _bits(source), [], [])


def _in_place(source: Tensor | None, out: Tensor | None) -> Tensor:
    """Return the result's memory, with this rank's input in it."""
    if out is None:
        assert source is not None
        return source
    if source is not None and source is not out and source.data_ptr() != out.data_ptr():
        out.copy_(source)
    return out


def _bits(tensor: Tensor | None) -> Tensor:
    """Return the tensor as bytes, a dtype that every group can move."""
    assert tensor is not None
    # Of one element, also a tensor with another stride is contiguous.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat if tensor.dtype is torch.float32 else flat.view(torch.uint8)


def _rows(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return one part for each rank."""
    return list(_bits(tensor).view(group.size(), -1).unbind(0))


class CollectiveWork(Handle):
    """A collective of a process group, and the copy of its result afterwards.

    finish   called once, when it is over, by the thread that notices; None: nothing
    """

    __slots__ = ("_finish", "_work", "on_stream")

    def __init__(self, work: Work, finish: Callable[[], object] | None, *, on_stream: bool) -> None:
        self._work: Work | None = work
        self._finish = finish
        self.on_stream = on_stream

    @override
    def done(self) -> bool:
        work = self._work
        if work is not None:
            if not work.is_completed():
                return False
            work.wait()  # raises its error
            self._end()
        return True

    @override
    def wait(self, seconds: float) -> bool:
        work = self._work
        if work is None:
            return True
        if self.on_stream:
            work.wait()
        else:
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


class ProcessGroupLibrary(Library):
    """A process group of torch's.

    kinds   the capabilities of such groups for each kind of device
    owned   whether it was made here, and is ended here, too
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
        self.devices = frozenset(kinds)
        self.has_subgroups = former is not None
        self.on_stream = any(kind.on_stream for kind in kinds.values())
        self._group = group
        self._kinds = kinds
        self._on_cpu = kinds.get("cpu")
        self._owned = owned
        self._former = former
        self._ended = False

    def _kind(self, call: NativeCall) -> GroupKind | None:
        tensor = call.source if call.source is not None else call.out
        assert tensor is not None
        return self._on_cpu if tensor.is_cpu else self._kinds.get(tensor.device.type)

    @override
    def has(self, call: NativeCall) -> bool:
        kind = self._kind(call)
        return kind is not None and kind.has(call)

    @override
    def collective(self, call: NativeCall) -> Handle:
        kind = self._kind(call)
        assert kind is not None
        if call.op is not None:
            work, finish = start_reduction(self._group, call, kind)
        else:
            work, finish = start_move(self._group, call), None
        return CollectiveWork(work, finish, on_stream=kind.on_stream)

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        assert self._former is not None
        group = self._former.form(members, ident, timeout)
        return ProcessGroupLibrary(group, self._kinds, owned=True)

    @override
    def close(self) -> None:
        if self._former is not None:
            self._former.stop.set()
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


def library_over(
    group: ProcessGroup,
    kinds: Mapping[str, GroupKind],
    place: tuple[Store, str] | None,
    topology: tuple[int, ...],
) -> Library:
    """Return a given process group as a library, whose sub-groups are formed through its store."""
    names = [name for name, known in KINDS.items() if kinds.items() <= known.items()]
    former = None
    if place is not None and len(kinds) == 1 and len(names) == 1 and names[0] in FORMED:
        former = GroupFormer(names[0], group.rank(), *place, topology)
    return ProcessGroupLibrary(group, kinds, owned=False, former=former)
