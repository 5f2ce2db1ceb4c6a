"""The way of a request: by another library, in shared memory, or by rounds of messages.

    TensorRequest  a call's request, with this rank's memory
    Resolved       the part that is the same for all calls of a kind: plan and way; cached

The backend's own library comes first, then shared memory, then messages. A call that asks for an
algorithm, or for `reproducible=True`, gets messages, or shared memory if that is the algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from phalanx.collectives.cost import choose
from phalanx.collectives.pieces import Elsewhere, join
from phalanx.collectives.plan import Arithmetic, Key, Plan, make_plan
from phalanx.collectives.request import Request
from phalanx.collectives.schedules import COLLECTIVES, REDUCING
from phalanx.collectives.shm.executor import ShmCollective
from phalanx.collectives.shm.plan import SHM_ALGORITHM
from phalanx.collectives.staging import Bound, StagedCollective
from phalanx.collectives.tuning import remember
from phalanx.core.backend import Backend
from phalanx.core.posted import Combine
from phalanx.core.reduce_op import ReduceOp, reduction_for
from phalanx.core.steps import NativeCall, Program
from phalanx.core.work import Work
from phalanx.errors import UnsupportedOperationError
from phalanx.wire.memory import copy_bits, tensor_bytes

log = logging.getLogger("phalanx")

T = TypeVar("T")


class Resolved(NamedTuple):
    """The plan of a collective, worked out once for all calls of its kind."""

    plan: Plan
    shm: ShmCollective | None  # in shared memory


Options: TypeAlias = "tuple[str, bool, str, float | None]"
"""Of every collective: algorithm, reproducible, label, timeout."""

Arguments: TypeAlias = (
    "tuple[str, Iterable[Program], Sequence[memoryview], Combine | None, str, int, float | None]"
)
"""Of `Backend.run`: name, program, buffers, combine, signature, fingerprint, timeout."""


@dataclass(slots=True)
class TensorRequest(Request[T]):
    """One collective of one rank. `NativeCall` lists the memory of each rank, and its shapes.

    collective   its row in the table of schedules
    shape        of the tensor that is cut into chunks: the larger one of `source` and `out`
    source       this rank's input: contiguous; not written, unless it is `out`
    out          memory for its result: contiguous; apart from `source`, or the same memory
    result       returns the caller's result in the end
    options      the arguments algorithm, reproducible, label and timeout of every collective
    consume      whether `source` may be overwritten, on every rank, which saves a copy
    elsewhere    pieces of this rank's own slice that are not in `source` yet (`pieces.py`)
    name         for messages and errors, if it is not the collective's
    """

    backend: Backend
    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Tensor | None
    out: Tensor | None
    result: Callable[[], T]
    options: Options
    op: ReduceOp | None = None
    root: int = 0
    consume: bool = False
    elsewhere: Elsewhere = ()
    name: str = ""

    @classmethod
    def all_reduce_(
        cls,
        memory: Tensor,
        backend: Backend,
        op: ReduceOp,
        result: Callable[[], T],
        options: Options,
    ) -> TensorRequest[T]:
        """Return an all-reduce of contiguous memory in place, which is not checked any more."""
        shape, dtype = memory.shape, memory.dtype
        return cls(backend, "all_reduce", shape, dtype, memory, memory, result, options, op)

    @override
    def run(self) -> T:
        arguments, result = self._bind()
        self.backend.run(*arguments)
        return result()

    @override
    def issue(self, *, background: bool = True) -> Work[T]:
        arguments, result = self._bind()
        return self.backend.issue(*arguments, result=result, background=background)

    def _bind(self) -> tuple[Arguments, Callable[[], T]]:
        """Return the arguments for the backend, and the function that returns the result."""
        backend, collective = self.backend, self.collective
        counters = backend.engine.counters  # first: it raises in a child that was forked
        algorithm, reproducible, label, timeout = self.options
        # What was right once is right again.
        kind = (collective, self.shape, self.dtype, self.op, self.root, algorithm, reproducible)
        resolved: Resolved | None = backend.cache.get(kind)  # type: ignore[assignment]
        plan, shm = resolved or remember(backend, kind, _resolve(self))
        steps: Iterable[Program] | None = None
        result, combine = self.result, None
        buffers: tuple[memoryview, ...] = ()
        source = self.source
        if (
            self.elsewhere
            and source is not None
            and not (shm is not None and backend.native is None and source.is_cpu)
        ):
            join(source, self.elsewhere)  # else shared memory's plan reads the pieces in place
            self.elsewhere = ()
        if backend.native is not None and algorithm == "auto" and not reproducible and plan.program:
            steps = backend.native.steps(
                NativeCall(collective, source, self.out, self.op, self.root)
            )
        if steps is None:
            first = source if source is not None else self.out
            if plan.program and first is not None and not first.is_cpu:
                return self._staged(plan, first.device)
            if shm is not None:
                steps = shm.steps(source, self.out, self.elsewhere, counters, consume=self.consume)
            else:
                steps, result, buffers, combine = self._by_messages(plan)
        signature, fingerprint = plan.signature, plan.fingerprint
        if label:
            signature = f"{signature}, {label}"
            fingerprint ^= xxh3_64_intdigest(label.encode())
        name = self.name or collective
        return (name, steps, buffers, combine, signature, fingerprint, timeout), result

    def _by_messages(
        self, plan: Plan
    ) -> tuple[Iterable[Program], Callable[[], T], tuple[memoryview, ...], Combine | None]:
        """Return the plan's rounds, the function that returns the result, the rounds' memory."""
        result = self.result
        work, source, own = ROUND_MEMORY[self.collective](self, plan)
        if own is not None:
            result = partial(self._taken_from, own)
        if not plan.program:  # then the memory may be of any device
            return (), result, (), None
        buffers: tuple[memoryview, ...] = (tensor_bytes(work),)
        if source is not None:
            buffers += (tensor_bytes(source),)
        if plan.reduction is None:
            return cast("Iterable[Program]", plan.program), result, buffers, None
        arithmetic = Arithmetic(plan, work, self.backend)
        if arithmetic.stage is not None:
            buffers += (tensor_bytes(arithmetic.stage),)
        return arithmetic.carry_out(), result, buffers, arithmetic.combine

    def _taken_from(self, own: Tensor) -> T:
        """Return the result, which has been reduced in memory of the rounds."""
        assert self.out is not None
        copy_bits(self.out, own.view(self.out.shape))
        return self.result()

    def _staged(self, plan: Plan, device: torch.device) -> tuple[Arguments, Callable[[], T]]:
        """Do `_bind` for tensors on a device, which go through host memory piece by piece."""
        backend, (_, _, label, timeout) = self.backend, self.options
        options, this = (plan.key.algorithm, False, "", None), cast("TensorRequest[None]", self)

        def bind(source: Tensor | None, out: Tensor | None, shape: tuple[int, ...]) -> Bound:
            piece = replace(
                this, source=source, out=out, shape=shape, result=lambda: None, options=options
            )
            piece.consume = True  # it is a copy
            (_, steps, buffers, combine, *_), finish = piece._bind()
            return steps, buffers, combine, finish

        staged = StagedCollective(
            backend.engine.copies_of(device, self.collective),
            self.collective,
            self.source,
            self.out,
            rank=backend.rank,
            size=backend.world_size,
            shape=self.shape,
            dtype=self.dtype,
            bind=bind,
        )

        def result() -> T:
            staged.order()
            return self.result()

        name, what = self.name or self.collective, f"{plan.signature}, on a device"
        what += f", {label}" if label else ""
        fingerprint = xxh3_64_intdigest(f"{self.collective} {what}".encode())
        return (
            (name, staged.steps(), staged.buffers, staged.combine, what, fingerprint, timeout),
            result,
        )


def _resolve(request: TensorRequest[Any]) -> Resolved:
    """Return the plan, with the algorithm that was asked for or the cheapest one.

    Raises `UnsupportedOperationError` for an algorithm that the collective has not, and for a
    reduction that has no meaning for the dtype.
    """
    backend, collective, dtype = request.backend, request.collective, request.dtype
    if collective in REDUCING:
        reduction_for(request.op, dtype, rank=backend.rank, collective=collective)
    algorithm, reproducible, *_ = request.options
    name = checked_algorithm(collective, algorithm, backend, reproducible=reproducible)
    tuning = ""
    if name == "auto":
        picked = choose(collective, prod(request.shape) * dtype.itemsize, backend)
        name, tuning = picked.algorithm, picked.tuning
        if backend.shares_memory and not tuning:
            name = SHM_ALGORITHM[collective]
    shape = list(request.shape)
    log.debug("rank %d: %s of %s %s: %s", backend.rank, collective, dtype, shape, name)
    hosts = backend.topology if COLLECTIVES[collective][name].placed else None
    key = Key(collective, name, request.shape, dtype, request.op, request.root, hosts, tuning)
    plan = make_plan(key, backend.rank, backend.world_size)
    shared = backend.shared if backend.shares_memory else None
    if shared is not None and plan.program and name == SHM_ALGORITHM[collective]:
        return Resolved(plan, ShmCollective(key, shared))
    return Resolved(plan, None)


def checked_algorithm(
    collective: str, algorithm: str, backend: Backend, *, reproducible: bool = False
) -> str:
    """Return the algorithm to use, or `auto`. `UnsupportedOperationError` if there is none."""
    rows = COLLECTIVES[collective]
    problem = None
    if algorithm != "auto" and algorithm not in rows:
        problem = f"has no algorithm {algorithm!r}; it has auto, {', '.join(rows)}"
    elif reproducible and algorithm not in ("auto", "direct"):
        problem = (
            f"with reproducible=True sums in rank order, which {algorithm!r} does not; leave out "
            "algorithm=, or ask for 'direct'"
        )
    if problem is not None:
        raise UnsupportedOperationError(
            f"rank {backend.rank}: {collective} {problem}", rank=backend.rank, op=collective
        )
    return "direct" if reproducible else algorithm


# ------------------------------------------------------------------------------
# The memory of rounds of messages: for each collective, a rank's memory as its schedule wants it.
#
# A schedule cuts one tensor into chunks, and combines into it or copies to it. So a rank's input
# has to be copied to the place of its result, or, if the result is a smaller one, to memory that is
# as large as the whole.


class RoundMemory(NamedTuple):
    """The memory of the rounds.

    work     the memory that is cut into chunks
    source   the memory that is sent, if that is another one
    own      the part of `work` that is this rank's result, if it has to be copied to `out`
    """

    work: Tensor
    source: Tensor | None = None
    own: Tensor | None = None


def _in_result(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """all_reduce, broadcast, reduce: the result's memory holds this rank's input.

    If a reduction has no result here, the input is reduced in place, or in a copy of it.
    """
    source, out = request.source, request.out
    if out is None:
        assert source is not None
        kept = plan.overwrites and not request.consume
        return RoundMemory(_copy(source, request.backend) if kept else source)
    if source is not None and source.data_ptr() != out.data_ptr():
        copy_bits(out, source)
    return RoundMemory(out)


def _in_its_place(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """all_gather, gather: this rank's part of the result; without one, room for chunks passing."""
    source, out = request.source, request.out
    assert source is not None
    if out is None:
        if plan.work_size <= source.nbytes:
            return RoundMemory(source)
        work = _room(request, plan)
        own = work[: source.numel()]
    else:
        work, own = out, _slice(out, request.backend)
    if own.data_ptr() != source.data_ptr():
        copy_bits(own.view(source.shape), source)
    return RoundMemory(work)


def _scattered(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """scatter: the root's tensor; on the others, room for chunks that pass through."""
    assert request.out is not None
    if request.source is not None:
        return RoundMemory(request.source, own=_slice(request.source, request.backend))
    if plan.work_size <= request.out.nbytes:
        return RoundMemory(request.out)
    work = _room(request, plan)
    return RoundMemory(work, own=work[: request.out.numel()])


def _reduced(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """reduce_scatter: the whole or a copy of it, of which this rank's slice is the result."""
    assert request.source is not None
    work = request.source if request.consume else _copy(request.source, request.backend)
    return RoundMemory(work, own=_slice(work, request.backend))


def _exchanged(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """all_to_all: from one tensor to another."""
    assert request.source is not None
    assert request.out is not None
    copy_bits(_slice(request.out, request.backend), _slice(request.source, request.backend))
    return RoundMemory(request.out, source=request.source)


def _slice(tensor: Tensor, backend: Backend) -> Tensor:
    """Return this rank's slice of a tensor that has one for each rank."""
    rows = tensor.shape[0] // backend.world_size
    return tensor[backend.rank * rows : (backend.rank + 1) * rows]


def _room(request: TensorRequest[Any], plan: Plan) -> Tensor:
    """Return as much memory as the plan needs, uninitialized."""
    return request.backend.empty(plan.work_size // request.dtype.itemsize, dtype=request.dtype)


def _copy(tensor: Tensor, backend: Backend) -> Tensor:
    copy = backend.empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy_bits(copy, tensor)
    return copy


ROUND_MEMORY: Mapping[str, Callable[[TensorRequest[Any], Plan], RoundMemory]] = MappingProxyType(
    {
        "all_reduce": _in_result,
        "broadcast": _in_result,
        "reduce": _in_result,
        "all_gather": _in_its_place,
        "gather": _in_its_place,
        "scatter": _scattered,
        "reduce_scatter": _reduced,
        "all_to_all": _exchanged,
    }
)
"""Collective -> the memory on which a rank's rounds work, with its input in place."""
