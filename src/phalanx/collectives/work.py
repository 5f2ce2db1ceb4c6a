"""What rounds of messages work on: for each collective, a rank's memory as its schedule wants it.

A schedule cuts one tensor into chunks, and combines into it or copies to it. So what a rank gives
has to be copied to where its result will be, or, where the result is a smaller one, to memory that
is as large as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.memory import copy_bits
from phalanx.collectives.plan import Plan
from phalanx.collectives.task import Task


class Work(NamedTuple):
    """The memory of the rounds.

    work     what is cut into chunks
    source   where what is sent lies, if that is other memory
    own      the part of `work` that is this rank's result, if it has to be copied to `out`
    """

    work: Tensor
    source: Tensor | None = None
    own: Tensor | None = None


def work_for(task: Task[Any], plan: Plan, backend: Backend) -> Work:
    """The memory on which this rank's rounds work, with what it gives in its place."""
    return _WORK[task.collective](task, plan, backend)


def _in_result(task: Task[Any], plan: Plan, backend: Backend) -> Work:
    """all_reduce, broadcast: the result's memory holds what this rank gives."""
    assert task.out is not None
    if task.source is not None and task.source.data_ptr() != task.out.data_ptr():
        copy_bits(task.out, task.source)
    return Work(task.out)


def _on_root(task: Task[Any], plan: Plan, backend: Backend) -> Work:
    """reduce: as before on the root; on the others in its own memory, or in a copy of it."""
    if backend.rank == task.root:
        return _in_result(task, plan, backend)
    assert task.source is not None
    return Work(_copy(task.source, backend) if plan.overwrites else task.source)


def _in_its_place(task: Task[Any], plan: Plan, backend: Backend) -> Work:
    """all_gather: this rank's part of the result."""
    assert task.source is not None
    assert task.out is not None
    own = _slice(task.out, backend)
    if own.data_ptr() != task.source.data_ptr():
        copy_bits(own.view(task.source.shape), task.source)
    return Work(task.out)


def _gathered(task: Task[Any], plan: Plan, backend: Backend) -> Work:
    """gather: as before on the root; on the others, room for what passes through."""
    if backend.rank == task.root:
        return _in_its_place(task, plan, backend)
    assert task.source is not None
    if plan.work_size <= task.source.nbytes:
        return Work(task.source)
    work = backend.empty(plan.work_size // task.dtype.itemsize, dtype=task.dtype)
    copy_bits(work[: task.source.numel()].view(task.source.shape), task.source)
    return Work(work)


def _scattered(task: Task[Any], plan: Plan, backend: Backend) -> Work:
    """scatter: the root's tensor; on the others, room for what passes through."""
    assert task.out is not None
    if backend.rank == task.root:
        assert task.source is not None
        return Work(task.source, own=_slice(task.source, backend))
    if plan.work_size <= task.out.nbytes:
        return Work(task.out)
    work = backend.empty(plan.work_size // task.dtype.itemsize, dtype=task.dtype)
    return Work(work, own=work[: task.out.numel()])


def _reduced(task: Task[Any], plan: Plan, backend: Backend) -> Work:
    """reduce_scatter: the whole or a copy of it, of which this rank's slice is the result."""
    assert task.source is not None
    work = task.source if task.consumes else _copy(task.source, backend)
    return Work(work, own=_slice(work, backend))


def _exchanged(task: Task[Any], plan: Plan, backend: Backend) -> Work:
    """all_to_all: from one tensor to another."""
    assert task.source is not None
    assert task.out is not None
    copy_bits(_slice(task.out, backend), _slice(task.source, backend))
    return Work(task.out, source=task.source)


def _slice(tensor: Tensor, backend: Backend) -> Tensor:
    """This rank's slice of a tensor that has one for each rank."""
    rows = tensor.shape[0] // backend.world_size
    return tensor[backend.rank * rows : (backend.rank + 1) * rows]


def _copy(tensor: Tensor, backend: Backend) -> Tensor:
    copy = backend.empty(*tensor.shape, dtype=tensor.dtype)
    copy_bits(copy, tensor)
    return copy


_WORK: Mapping[str, Callable[[Task[Any], Plan, Backend], Work]] = MappingProxyType(
    {
        "all_reduce": _in_result,
        "broadcast": _in_result,
        "reduce": _on_root,
        "all_gather": _in_its_place,
        "gather": _gathered,
        "scatter": _scattered,
        "reduce_scatter": _reduced,
        "all_to_all": _exchanged,
    }
)
