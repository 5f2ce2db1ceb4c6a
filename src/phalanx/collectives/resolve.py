"""How a request is carried out: by another library, in shared memory, or by rounds of messages.

    TensorRequest  what is asked for, with this rank's memory (request.py makes one a call)
    Resolved       what of it is the same for all calls of a kind: the plan, and how; cached
    BoundProgram   the steps of one call, for the engine

The backend's own library comes first, then shared memory, then messages. Who asks for an algorithm,
or for `reproducible=True`, gets messages, or shared memory where that is the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from phalanx.collectives.cost import choose
from phalanx.collectives.plan import Arithmetic, Key, Plan, borrow_stage, make_plan, then_return
from phalanx.collectives.reduce_op import reduction_for
from phalanx.collectives.request import Request, TensorArguments
from phalanx.collectives.schedules import COLLECTIVES, REDUCING
from phalanx.collectives.shm_direct import SHM_DIRECT, ShmDirect
from phalanx.collectives.tuning import remembered
from phalanx.core.backend import Backend
from phalanx.core.posted import Combine
from phalanx.core.steps import Native, NativeCall, Program, Step
from phalanx.core.work import Work
from phalanx.errors import UnsupportedOperationError
from phalanx.transport.shm.control import ControlBlock
from phalanx.wire.memory import copy_bits, tensor_bytes

T = TypeVar("T")


@dataclass(slots=True)
class TensorRequest(TensorArguments[T], Request[T]):
    """One collective of one rank. `signature` and `fingerprint` say what it is, for agreement."""

    signature: str = ""
    fingerprint: int = 0

    @override
    def run(self) -> T:
        program = self._bound()
        self.backend.run(
            self.name or self.collective,
            program.steps,
            program.buffers,
            combine=program.combine,
            signature=self.signature,
            fingerprint=self.fingerprint,
            timeout=self.timeout,
        )
        return cast("T", program.result())

    @override
    def issue(self, *, background: bool = True) -> Work[T]:
        program = self._bound()
        return self.backend.issue(
            self.name or self.collective,
            program.steps,
            program.buffers,
            combine=program.combine,
            result=program.result,
            signature=self.signature,
            fingerprint=self.fingerprint,
            timeout=self.timeout,
            background=background,
        )

    def _bound(self) -> BoundProgram:
        """The steps of this call; `signature` and `fingerprint` are known from now on."""
        plan, shm = resolve(self)
        self.signature, self.fingerprint = plan.signature, plan.fingerprint
        if self.label:
            self.signature = f"{plan.signature}, {self.label}"
            self.fingerprint ^= xxh3_64_intdigest(self.label.encode())
        if self.backend.native is not None and self.algorithm == "auto" and not self.reproducible:
            native = self._native_step(self.backend.native, plan)
            if native is not None:
                return BoundProgram((native,), self.result)
        first = self.source if self.source is not None else self.out
        if first is not None and not first.is_cpu:
            raise self._device_error(plan, first)
        if shm is not None:
            return BoundProgram(shm.steps(self), self.result)
        return by_messages(self, plan)

    def _device_error(self, plan: Plan, tensor: Tensor) -> UnsupportedOperationError:
        backend = self.backend
        why = "this backend moves CPU memory"
        if backend.native is not None:
            why = "its library has no such collective, and messages move CPU memory"
        return UnsupportedOperationError(
            f"rank {backend.rank}: {self.collective} ({plan.signature}) of a tensor on "
            f"{tensor.device}: {why}; move it with .cpu()",
            rank=backend.rank,
            op=self.collective,
        )

    def _native_step(self, native: Native, plan: Plan) -> Step | None:
        """The step that does it by the backend's library, if that has it."""
        if not plan.program:
            return None
        self.settle()
        op = self.op._value_ if self.op is not None else None  # `value` looks it up each time
        return native.step(NativeCall(self.collective, self.source, self.out, op, self.root))


class Resolved(NamedTuple):
    """How a collective is done, worked out once for all calls of its kind."""

    plan: Plan
    shm: ShmDirect | None  # in shared memory


class BoundProgram(NamedTuple):
    """The program of one call, and the memory that it works on."""

    steps: Iterable[Program]
    result: Callable[[], Any]
    buffers: tuple[memoryview, ...] = ()
    combine: Combine | None = None


def resolve(request: TensorRequest[Any]) -> Resolved:
    """How to do this, with the algorithm that was asked for or the cheapest one.

    Raises `UnsupportedOperationError` for an algorithm that the collective has not, and for a
    reduction that has no meaning for the dtype; `InvalidRankError` for the root.
    """
    backend, root = request.backend, request.root
    if type(root) is not int or root:
        backend.check_rank(root, "root")
    # Arguments that were right once are right again.
    arguments = (
        *(request.collective, request.shape, request.dtype, request.op, root),
        *(request.algorithm, request.reproducible),
    )
    return remembered(backend, arguments, lambda: _resolve(request))


def _resolve(request: TensorRequest[Any]) -> Resolved:
    backend, collective, dtype = request.backend, request.collective, request.dtype
    if collective in REDUCING:
        reduction_for(request.op, dtype, rank=backend.rank, collective=collective)
    name = checked_algorithm(
        collective, request.algorithm, backend, reproducible=request.reproducible
    )
    tuning = ""
    if name == "auto":
        picked = choose(collective, prod(request.shape) * dtype.itemsize, backend)
        name, tuning = picked.algorithm, picked.tuning
        if backend.shares_memory and not tuning:
            name = SHM_DIRECT[collective]
    hosts = backend.topology if COLLECTIVES[collective][name].placed else None
    key = Key(collective, name, request.shape, dtype, request.op, request.root, hosts, tuning)
    plan = make_plan(key, backend.rank, backend.world_size)
    shared = backend.shared
    if backend.shares_memory and plan.program and name == SHM_DIRECT[collective]:
        assert isinstance(shared, ControlBlock)
        return Resolved(plan, ShmDirect(plan, shared))
    return Resolved(plan, None)


def checked_algorithm(
    collective: str, algorithm: str, backend: Backend, *, reproducible: bool = False
) -> str:
    """The algorithm to use, or `auto`. Raises `UnsupportedOperationError` if there is none."""
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


def by_messages(request: TensorRequest[Any], plan: Plan) -> BoundProgram:
    """By the rounds of the plan."""
    backend = request.backend
    if request.own:
        request.settle()
    work, source, own = ROUND_MEMORY[request.collective](request, plan)
    buffers: tuple[memoryview, ...] = (tensor_bytes(work),)
    if source is not None:
        buffers += (tensor_bytes(source),)

    def result() -> Any:
        if own is not None:
            assert request.out is not None
            copy_bits(request.out, own.view(request.out.shape))
        return request.result()

    if plan.reduction is None or not plan.program:
        return BoundProgram(cast("Iterable[Program]", plan.program), result, buffers)
    stage = None
    if plan.stage_size:
        stage = borrow_stage(backend, plan.stage_size)
        buffers += (tensor_bytes(stage),)
    arithmetic = Arithmetic(plan, work, stage, backend.world_size)
    steps = arithmetic.carry_out(plan.program)
    if stage is not None:
        steps = then_return(steps, backend, stage)
    return BoundProgram(steps, result, buffers, arithmetic.combine)


# ------------------------------------------------------------------------------
# What rounds of messages work on: for each collective, a rank's memory as its schedule wants it.
#
# A schedule cuts one tensor into chunks, and combines into it or copies to it. So what a rank gives
# has to be copied to where its result will be, or, where the result is a smaller one, to memory
# that is as large as the whole.


class RoundMemory(NamedTuple):
    """The memory of the rounds.

    work     what is cut into chunks
    source   where what is sent lies, if that is other memory
    own      the part of `work` that is this rank's result, if it has to be copied to `out`
    """

    work: Tensor
    source: Tensor | None = None
    own: Tensor | None = None


def _in_result(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """all_reduce, broadcast: the result's memory holds what this rank gives."""
    assert request.out is not None
    if request.source is not None and request.source.data_ptr() != request.out.data_ptr():
        copy_bits(request.out, request.source)
    return RoundMemory(request.out)


def _on_root(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """reduce: as before on the root; on the others in its own memory, or in a copy of it."""
    if request.backend.rank == request.root:
        return _in_result(request, plan)
    assert request.source is not None
    return RoundMemory(
        _copy(request.source, request.backend) if plan.overwrites else request.source
    )


def _in_its_place(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """all_gather: this rank's part of the result."""
    assert request.source is not None
    assert request.out is not None
    own = _slice(request.out, request.backend)
    if own.data_ptr() != request.source.data_ptr():
        copy_bits(own.view(request.source.shape), request.source)
    return RoundMemory(request.out)


def _gathered(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """gather: as before on the root; on the others, room for what passes through."""
    if request.backend.rank == request.root:
        return _in_its_place(request, plan)
    assert request.source is not None
    if plan.work_size <= request.source.nbytes:
        return RoundMemory(request.source)
    work = request.backend.empty(plan.work_size // request.dtype.itemsize, dtype=request.dtype)
    copy_bits(work[: request.source.numel()].view(request.source.shape), request.source)
    return RoundMemory(work)


def _scattered(request: TensorRequest[Any], plan: Plan) -> RoundMemory:
    """scatter: the root's tensor; on the others, room for what passes through."""
    assert request.out is not None
    if request.backend.rank == request.root:
        assert request.source is not None
        return RoundMemory(request.source, own=_slice(request.source, request.backend))
    if plan.work_size <= request.out.nbytes:
        return RoundMemory(request.out)
    work = request.backend.empty(plan.work_size // request.dtype.itemsize, dtype=request.dtype)
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
    """This rank's slice of a tensor that has one for each rank."""
    rows = tensor.shape[0] // backend.world_size
    return tensor[backend.rank * rows : (backend.rank + 1) * rows]


def _copy(tensor: Tensor, backend: Backend) -> Tensor:
    copy = backend.empty(*tensor.shape, dtype=tensor.dtype)
    copy_bits(copy, tensor)
    return copy


ROUND_MEMORY: Mapping[str, Callable[[TensorRequest[Any], Plan], RoundMemory]] = MappingProxyType(
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
"""Collective -> the memory on which a rank's rounds work, with its input in place."""
