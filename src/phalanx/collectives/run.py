"""The executor: a plan and a tensor become an operation of the backend.

Every collective prepares its work buffer, calls `start`, and says what its result is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.backends.base import Backend
from phalanx.backends.engine.operation import LocalStep
from phalanx.backends.memory import check_on_cpu, tensor_bytes
from phalanx.collectives.cost import choose
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.plan import Finish, Fold, Key, plan_for
from phalanx.collectives.reduce_op import ReduceOp, divide_, reduction_for
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.errors import MisuseError, SizeMismatchError, UnsupportedOperationError


class Prepared(NamedTuple):
    """A collective's memory: what is worked on, and what the caller gets of it afterwards."""

    work: Tensor  # contiguous; may be overwritten
    result: Callable[[], Tensor]


def start(
    collective: str,
    prepared: Prepared,
    backend: Backend,
    *,
    op: ReduceOp | None = None,
    root: int = 0,
    algorithm: str = "auto",
    timeout: float | None = None,
    background: bool = False,
    label: str = "",
) -> PendingCollective[Tensor]:
    """Begin a collective. Ranks whose labels differ do not mean the same: a `DesyncError`."""
    work, result = prepared
    if algorithm == "auto":
        algorithm = choose(collective, work.nbytes, backend).algorithm
    elif algorithm not in COLLECTIVES[collective]:
        raise UnsupportedOperationError(
            f"rank {backend.rank}: {collective} has no algorithm {algorithm!r}; it has auto, "
            f"{', '.join(COLLECTIVES[collective])}",
            rank=backend.rank,
            op=collective,
        )
    key = Key(collective, algorithm, tuple(work.shape), work.dtype, op, root)
    plan = plan_for(backend, key)
    buffers: tuple[memoryview, ...] = (tensor_bytes(work),)
    arithmetic = None
    if op is not None:
        stage = torch.empty(plan.stage_size, dtype=torch.uint8)
        buffers += (tensor_bytes(stage),)
        arithmetic = _Arithmetic(work, stage, op, backend.world_size)
    operation = backend.start(
        collective,
        plan.program,
        buffers,
        combine=arithmetic.combine if arithmetic is not None else None,
        local=arithmetic.local if arithmetic is not None else None,
        signature=plan.signature + (f", {label}" if label else ""),
        fingerprint=plan.fingerprint ^ (xxh3_64_intdigest(label.encode()) if label else 0),
        timeout=timeout,
        background=background,
    )
    return PendingCollective(backend, operation, result)


class _Arithmetic:
    """What a plan's reductions are on these tensors."""

    def __init__(self, work: Tensor, stage: Tensor, op: ReduceOp, size: int) -> None:
        self._flat = work.view(-1)
        self._stage = stage
        self._reduce = reduction_for(op, work.dtype).combine
        self._size = size

    def combine(self, buffer: int, start: int, block: memoryview) -> None:
        """Reduce a block that came into the work buffer, from byte `start` on."""
        incoming = torch.frombuffer(block, dtype=self._flat.dtype)
        first = start // self._flat.itemsize
        self._reduce(self._flat[first : first + incoming.numel()], incoming)

    def local(self, step: LocalStep) -> None:
        """Carry out a step between rounds."""
        if isinstance(step, Fold):
            self._fold(step)
        else:
            assert isinstance(step, Finish)
            divide_(self._flat[step.start : step.stop], self._size)

    def _fold(self, step: Fold) -> None:
        own = self._flat[step.start : step.stop]
        parts = [own if slot is None else self._staged(slot, own) for slot in step.slots]
        total = parts[0]
        for part in parts[1:]:
            self._reduce(total, part)
        if total is not own:
            own.copy_(total)

    def _staged(self, slot: int, like: Tensor) -> Tensor:
        return self._stage[slot : slot + like.nbytes].view(like.dtype)


def fresh(tensor: Tensor, backend: Backend, into: Tensor | None, op: str) -> Prepared:
    """Work on a copy of `tensor`, in `into` if that is given; the result is that memory."""
    prepared = empty(tuple(tensor.shape), tensor, backend, into, op)
    prepared.work.copy_(tensor.detach())
    return prepared


def empty(
    shape: tuple[int, ...], like: Tensor, backend: Backend, into: Tensor | None, op: str
) -> Prepared:
    """Work on uninitialized memory, in `into` if that is given; the result is that memory."""
    check_on_cpu(like)
    dtype = like.dtype
    check_into(into, shape, dtype, backend, op)
    if into is not None and into.is_contiguous():
        work = into.detach()
    else:
        work = backend.empty(*shape, dtype=dtype)
    return Prepared(work, lambda: finish_into(into, work) if into is not None else work)


def in_place(tensor: Tensor) -> Prepared:
    """Work on `tensor` itself, or on a contiguous copy that is copied back."""
    check_on_cpu(tensor)
    check_distinct(tensor)
    work = tensor.detach().contiguous()
    return Prepared(work, lambda: finish_into(tensor, work))


def finish_into(into: Tensor, work: Tensor) -> Tensor:
    """`into` with the values of `work`; autograd is told that it changed."""
    target = into.detach()
    if target.data_ptr() != work.data_ptr() or not into.is_contiguous():
        target.copy_(work)
    torch.autograd.graph.increment_version(into)
    return into


def check_distinct(tensor: Tensor) -> None:
    """Raise `MisuseError` if several elements lie in one place, as in what `expand` gives."""
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise MisuseError(
            f"a tensor of shape {list(tensor.shape)} has several elements in one place (strides "
            f"{list(tensor.stride())}), which cannot hold several results; use .contiguous()"
        )


def check_into(
    into: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, backend: Backend, op: str
) -> None:
    """Raise `SizeMismatchError` unless `into` can hold the result."""
    if into is None:
        return
    check_distinct(into)
    if tuple(into.shape) != shape or into.dtype != dtype:
        raise SizeMismatchError(
            f"rank {backend.rank}: {op}: into= is {into.dtype} {list(into.shape)}, the result is "
            f"{dtype} {list(shape)}",
            rank=backend.rank,
            op=op,
        )
