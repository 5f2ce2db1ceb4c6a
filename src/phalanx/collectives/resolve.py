"""The executor: a task becomes an operation of the backend.

Every collective checks its arguments, makes a task of them (task.py), and calls `run` or `start`.
What a backend's own library has, that does; else the task's plan is carried out, by rounds of
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, cast

from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.collectives.cost import choose
from phalanx.collectives.plan import Arithmetic, Key, Plan, borrow_stage, make_plan, then_return
from phalanx.collectives.reduce_op import reduction_for
from phalanx.collectives.request import PendingCollective, Task
from phalanx.collectives.schedules import COLLECTIVES, REDUCING
from phalanx.collectives.shm_direct import SHM_DIRECT, Flat
from phalanx.collectives.tuning import remembered
from phalanx.core.backend import Backend
from phalanx.core.steps import Call, Round, Step
from phalanx.core.work import Combine
from phalanx.errors import UnsupportedOperationError
from phalanx.transport.shm.control import ControlBlock
from phalanx.wire.memory import copy_bits, tensor_bytes

T = TypeVar("T")


class Choice(NamedTuple):
    """How a collective is done, worked out once for all calls of its kind."""

    plan: Plan
    flat: Flat | None  # in shared memory


def chosen(
    task: Task[T], backend: Backend, algorithm: str = "auto", *, reproducible: bool = False
) -> Choice:
    """How to do this, with the algorithm that was asked for or the cheapest one.

    Raises `UnsupportedOperationError` for an algorithm that the collective has not, and for a
    reduction that has no meaning for the dtype; `InvalidRankError` for the root.
    """
    collective, shape, dtype, op, root = task.collective, task.shape, task.dtype, task.op, task.root
    if type(root) is not int or root:
        backend.check_rank(root, "root")

    def checked() -> Choice:
        if collective in REDUCING:
            reduction_for(op, dtype, rank=backend.rank, collective=collective)
        name = checked_algorithm(collective, algorithm, backend, reproducible=reproducible)
        control = backend.group.shared
        together = control is not None and control.size == backend.world_size
        tuning = ""
        if name == "auto":
            picked = choose(collective, prod(shape) * dtype.itemsize, backend)
            name, tuning = picked.algorithm, picked.tuning
            if together and not tuning:
                name = SHM_DIRECT[collective]
        hosts = backend.topology if COLLECTIVES[collective][name].placed else None
        key = Key(collective, name, shape, dtype, op, root, hosts, tuning)
        plan = make_plan(key, backend.rank, backend.world_size)
        if (
            together
            and isinstance(control, ControlBlock)
            and plan.program
            and name == SHM_DIRECT[collective]
        ):
            return Choice(plan, Flat(plan, control))
        return Choice(plan, None)

    # Arguments that were right once are right again.
    arguments = (collective, shape, dtype, op, root, algorithm, reproducible)
    return remembered(backend, arguments, checked)


def start(
    task: Task[T],
    backend: Backend,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    name: str | None = None,
    timeout: float | None = None,
    background: bool = False,
    label: str = "",
) -> PendingCollective[T]:
    """Begin a collective.

    name    another one than the schedule's, for messages
    label   ranks whose labels differ do not mean the same: a `DesyncError`
    """
    return _start(
        task,
        chosen(task, backend, algorithm, reproducible=reproducible),
        backend,
        freely=algorithm == "auto" and not reproducible,
        name=name,
        timeout=timeout,
        background=background,
        label=label,
    )


def run(
    task: Task[T],
    backend: Backend,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> T:
    """Carry out a collective and return its result. Blocks."""
    choice = chosen(task, backend, algorithm, reproducible=reproducible)
    plan, flat = choice
    if flat is None:
        task.settle(backend)
        freely = algorithm == "auto" and not reproducible
        call = _native_call(task, plan, backend) if freely else None
        if call is None:
            return _start(task, choice, backend, freely=False, timeout=timeout).wait()
        backend.call(call, signature=plan.signature, fingerprint=plan.fingerprint, timeout=timeout)
        return task.result()
    backend.carry_out(
        task.collective,
        flat.steps(task),
        signature=plan.signature,
        fingerprint=plan.fingerprint,
        timeout=timeout,
    )
    return task.result()


def _start(
    task: Task[T],
    choice: Choice,
    backend: Backend,
    *,
    freely: bool,
    name: str | None = None,
    timeout: float | None = None,
    background: bool = False,
    label: str = "",
) -> PendingCollective[T]:
    """`freely`: the caller has asked for no algorithm."""
    plan = choice.plan
    signature, fingerprint = plan.signature, plan.fingerprint
    if label:
        signature = f"{signature}, {label}"
        fingerprint ^= xxh3_64_intdigest(label.encode())
    way = _way(task, choice, backend, freely=freely)
    operation = backend.start(
        name or task.collective,
        way.steps,
        way.buffers,
        combine=way.combine,
        signature=signature,
        fingerprint=fingerprint,
        timeout=timeout,
        background=background,
    )
    return PendingCollective(backend, operation, way.result)


@dataclass(slots=True)
class _Way(Generic[T]):
    """How a collective is done: as an operation's program, on this memory."""

    steps: Iterable[Step]
    result: Callable[[], T]
    buffers: tuple[memoryview, ...] = ()
    combine: Combine | None = None


def _way(task: Task[T], choice: Choice, backend: Backend, *, freely: bool) -> _Way[T]:
    plan, flat = choice
    if flat is not None:
        return _Way(flat.steps(task), task.result)
    task.settle(backend)
    call = _native_call(task, plan, backend) if freely else None
    if call is not None:
        return _Way((call,), task.result)
    return _by_messages(task, plan, backend)


def _native_call(task: Task[T], plan: Plan, backend: Backend) -> Call | None:
    """The task as a collective of the backend's library, if that has it."""
    native = backend.native
    if native is None or not plan.program:
        return None
    op = task.op._value_ if task.op is not None else None  # `value` looks it up each time
    call = Call(task.collective, task.source, task.out, op, task.root)
    return call if native.has(call) else None


def _by_messages(task: Task[T], plan: Plan, backend: Backend) -> _Way[T]:
    """By the rounds of the plan."""
    given = task.source if task.source is not None else task.out
    if given is not None and not given.is_cpu:
        raise UnsupportedOperationError(
            f"rank {backend.rank}: {plan.key.collective} ({plan.signature}) of a tensor on "
            f"{given.device}: {_why_not_native(backend)}; move it with .cpu()",
            rank=backend.rank,
            op=plan.key.collective,
        )
    work, source, own = work_for(task, plan, backend)
    buffers: tuple[memoryview, ...] = (tensor_bytes(work),)
    if source is not None:
        buffers += (tensor_bytes(source),)

    def result() -> T:
        if own is not None:
            assert task.out is not None
            copy_bits(task.out, own.view(task.out.shape))
        return task.result()

    if plan.reduction is None or not plan.program:
        return _Way(cast("tuple[Round, ...]", plan.program), result, buffers)
    stage = None
    if plan.stage_size:
        stage = borrow_stage(backend, plan.stage_size)
        buffers += (tensor_bytes(stage),)
    arithmetic = Arithmetic(plan, work, stage, backend.world_size)
    steps = arithmetic.carry_out(plan.program)
    if stage is not None:
        steps = then_return(steps, backend, stage)
    return _Way(steps, result, buffers, arithmetic.combine)


def _why_not_native(backend: Backend) -> str:
    if backend.native is None:
        return "this backend moves CPU memory"
    return "its library has no such collective, and messages move CPU memory"


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


# ------------------------------------------------------------------------------
# What rounds of messages work on: for each collective, a rank's memory as its schedule wants it.
#
# A schedule cuts one tensor into chunks, and combines into it or copies to it. So what a rank gives
# has to be copied to where its result will be, or, where the result is a smaller one, to memory
# that is as large as the whole.


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
