"""A task: one collective of one rank, with its memory, before it is decided how to do it.

functions/    check what the caller gave, and make a task of it
task          what is given, where the result goes, what the caller gets
run.py        how: the backend's own library, shared memory, or rounds of messages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from phalanx.collectives.checks import check_distinct, check_into
from phalanx.collectives.reduce_op import ReduceOp
from phalanx.core.backend import Backend
from phalanx.wire.memory import copy_bits, is_plain, plain

if TYPE_CHECKING:
    from phalanx.core.work import Operation
T = TypeVar("T")


@dataclass(slots=True)
class Task(Generic[T]):
    """What a collective gives and gets. Which of them a rank has, and of which shape, is in `Call`.

    collective   its row in the table of schedules
    shape        of the tensor that is cut into chunks: the larger one of `source` and `out`
    source       what this rank gives: contiguous; not written, unless it is `out`
    out          where its result goes: contiguous; apart from `source`, or the same memory
    result       what the caller gets in the end
    consumes     whether `source` may be overwritten meanwhile, which saves a copy
    elsewhere    of a reduce-scatter: parts of this rank's own slice that are not in `source`, where
                 their place is: the element of the slice at which each begins, and its values,
                 contiguous. Where memory is shared nobody else reads them, which saves copies
    """

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Tensor | None
    out: Tensor | None
    result: Callable[[], T]
    op: ReduceOp | None = None
    root: int = 0
    consumes: bool = False
    elsewhere: tuple[tuple[int, Tensor], ...] = ()

    def settle(self, backend: Backend) -> None:
        """Put what is elsewhere in its place in `source`."""
        if self.elsewhere:
            assert self.source is not None
            flat = self.source.view(-1)
            slice_ = flat.numel() // backend.world_size
            for element, values in self.elsewhere:
                start = backend.rank * slice_ + element
                copy_bits(flat[start : start + values.numel()], values.view(-1))
            self.elsewhere = ()


class Out(NamedTuple):
    """Memory for a result: contiguous, and what the caller gets of it."""

    memory: Tensor
    result: Callable[[], Tensor]


def memory_for(
    backend: Backend, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Uninitialized memory on a device: if that is the processor, the backend's own."""
    if device.type == "cpu":
        return backend.empty(*shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def out_for(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    backend: Backend,
    into: Tensor | None,
    op: str,
    *,
    device: torch.device,
) -> Out:
    """Uninitialized memory for a result: `into`, if that is given; else new, on the device.

    Raises `SizeMismatchError` if `into` does not fit.
    """
    if into is None:
        memory = memory_for(backend, shape, dtype, device)
        return Out(memory, lambda: memory)
    check_into(into, shape, dtype, backend, op)
    memory = into.detach() if is_plain(into) else memory_for(backend, shape, dtype, into.device)
    return Out(memory, lambda: finish_into(into, memory))


def in_place(
    collective: str, tensor: Tensor, *, op: ReduceOp | None = None, root: int = 0
) -> Task[Tensor]:
    """A task that works on `tensor` itself, or on a contiguous copy that is copied back."""
    if is_plain(tensor):
        memory = tensor.detach() if tensor.requires_grad else tensor
    else:
        check_distinct(tensor)
        memory = plain(tensor)

    def result() -> Tensor:
        return finish_into(tensor, memory)

    return Task(collective, tuple(tensor.shape), tensor.dtype, memory, memory, result, op, root)


def given(tensor: Tensor, out: Tensor | None, *, same: Tensor | None = None) -> Tensor:
    """What a rank gives, contiguous, and apart from `out`, or exactly `same`, a part of that."""
    values = plain(tensor)
    if out is None:
        return values
    start, first = values.data_ptr(), out.data_ptr()
    if start >= first + out.nbytes or first >= start + values.nbytes:
        return values
    if same is not None and start == same.data_ptr():
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    copy_bits(copy, values)
    return copy


def finish_into(into: Tensor, work: Tensor) -> Tensor:
    """`into` with the values of `work`; autograd is told that it changed."""
    if into is not work and (into.data_ptr() != work.data_ptr() or not is_plain(into)):
        copy_bits(into.detach(), work)
    torch.autograd.graph.increment_version(into)
    return into


# ------------------------------------------------------------------------------
# `PendingCollective`: a collective that is under way.

U = TypeVar("U")


class PendingCollective(Generic[T]):
    """What an asynchronous collective returns at once.

    The tensors that were given to it must not be written before it is done; one that is worked on
    in place, or that is received into, must not be read either. Any number may be outstanding on
    one backend; collectives of one group run in the order in which they were issued. A
    `PendingCollective` need not be waited for, but its error is then seen only by the next call.
    """

    def __init__(self, backend: Backend, operation: Operation, result: Callable[[], T]) -> None:
        self._backend = backend
        self._operation = operation
        self._finish: Callable[[], T] | None = result
        self._result: T | None = None

    @property
    def op_name(self) -> str:
        """Which collective it is, such as `all_reduce`."""
        return self._operation.name

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once. Moves what can be moved meanwhile."""
        if not self._operation.done:
            self._backend.engine.look_at(self._operation)
        return self._operation.done

    def wait(self, timeout: float | None = None) -> T:
        """Block until the collective is done and return its result; again, the same object.

        Raises the collective's error, each time it is called. `timeout` is in seconds from now, and
        replaces the one that the collective was issued with; when it passes, the collective fails.
        """
        self._backend.wait(self._operation, timeout=timeout)
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # type: ignore[return-value]

    def giving(self, result: Callable[[], U]) -> PendingCollective[U]:
        """The same collective, whose result is what `result` returns once it is done."""
        return PendingCollective(self._backend, self._operation, result)
