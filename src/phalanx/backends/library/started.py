"""How each collective is started on a process group of torch's.

Each row takes the group and the call, and gives torch's `Work` and what is to be done when that is
over. Reductions work in place, so that what is given is copied to where the result will be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from phalanx.backends.library.kinds import GroupKind
from phalanx.backends.native import Call

ProcessGroup = Any
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


START: Mapping[str, Callable[[ProcessGroup, Call, GroupKind], Started]] = MappingProxyType(
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
