"""The executor: a plan and a tensor become an operation of the backend.

Every collective prepares its memory (prepare.py), calls `start`, and says what its result is.
Those whose memory depends on the plan call its two halves, `planned` and `launch`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.backends.base import Backend
from phalanx.backends.memory import tensor_bytes
from phalanx.collectives.arithmetic import Arithmetic
from phalanx.collectives.cost import choose
from phalanx.collectives.memo import remembered
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.plan import Key, Plan, make_plan
from phalanx.collectives.prepare import Prepared, fresh, in_place
from phalanx.collectives.reduce_op import ReduceOp, reduction_for
from phalanx.collectives.schedules import COLLECTIVES, REDUCING
from phalanx.errors import UnsupportedOperationError

__all__ = ["Prepared", "checked_algorithm", "fresh", "in_place", "launch", "planned", "start"]

T = TypeVar("T")


def planned(
    collective: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    backend: Backend,
    *,
    op: ReduceOp | None = None,
    root: int = 0,
    algorithm: str = "auto",
    reproducible: bool = False,
) -> Plan:
    """This rank's plan for a call, with the algorithm that was asked for or the cheapest one.

    shape    of the tensor that the collective cuts into chunks
    root     is checked

    Raises `UnsupportedOperationError` for an algorithm that the collective has not, and for a
    reduction that has no meaning for the dtype; `InvalidRankError` for the root.
    """
    if type(root) is not int or root:
        backend.check_rank(root, "root")

    def checked() -> Plan:
        if collective in REDUCING:
            reduction_for(op, dtype, rank=backend.rank, collective=collective)
        name = checked_algorithm(collective, algorithm, backend, reproducible=reproducible)
        if name == "auto":
            name = choose(collective, prod(shape) * dtype.itemsize, backend).algorithm
        hosts = backend.topology if COLLECTIVES[collective][name].placed else None
        return make_plan(
            Key(collective, name, shape, dtype, op, root, hosts), backend.rank, backend.world_size
        )

    # Arguments that were right once are right again.
    arguments = (collective, shape, dtype, op, root, algorithm, reproducible)
    return remembered(backend, arguments, checked)


def launch(
    plan: Plan,
    work: Tensor,
    backend: Backend,
    result: Callable[[], T],
    *,
    source: Tensor | None = None,
    name: str | None = None,
    timeout: float | None = None,
    background: bool = False,
    label: str = "",
) -> PendingCollective[T]:
    """Begin what is planned, on this memory. See `start`; `name` is another one for messages."""
    buffers: tuple[memoryview, ...] = (tensor_bytes(work),)
    arithmetic = None
    if source is not None:
        buffers += (tensor_bytes(source),)
    if plan.reduction is not None and plan.program:
        stage = None
        if plan.stage_size:
            stage = torch.empty(plan.stage_size, dtype=torch.uint8)
            buffers += (tensor_bytes(stage),)
        arithmetic = Arithmetic(plan, work, stage, backend.world_size)
    operation = backend.start(
        name or plan.key.collective,
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


def start(
    collective: str,
    prepared: Prepared,
    backend: Backend,
    *,
    op: ReduceOp | None = None,
    root: int = 0,
    algorithm: str = "auto",
    reproducible: bool = False,
    name: str | None = None,
    timeout: float | None = None,
    background: bool = False,
    label: str = "",
) -> PendingCollective[Tensor]:
    """Begin a collective. Ranks whose labels differ do not mean the same: a `DesyncError`."""
    work, result = prepared
    plan = planned(
        collective,
        tuple(work.shape),
        work.dtype,
        backend,
        op=op,
        root=root,
        algorithm=algorithm,
        reproducible=reproducible,
    )
    return launch(
        plan,
        work,
        backend,
        result,
        name=name,
        timeout=timeout,
        background=background,
        label=label,
    )


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
