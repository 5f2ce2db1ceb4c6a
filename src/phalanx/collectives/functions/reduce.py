"""reduce: the root gets the reduction of all ranks' tensors."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.plan import Plan
from phalanx.collectives.prepare import (
    Prepared,
    check_tensor,
    copy_bits,
    fresh,
    in_place,
    plain,
)
from phalanx.collectives.reduce_op import ReduceOp
from phalanx.collectives.run import launch, planned


def reduce(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor | None:
    """The reduction of every rank's `tensor`, on rank `root`; None on the others.

    tensor      of the same shape and dtype on every rank; not changed
    root        the rank that gets the result; the same on every rank
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where the root puts the result, of the same shape and dtype; else a new tensor. The
                other ranks need not give it, and leave it alone
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until the root has the result; the others, until their part is done. A tree sends the
    tensor once from every rank but the root; a ring, and halving, at most (p-1)/p of it and then
    what is complete to the root, which gets at most 2(p-1)/p of it rather than log2 p times the
    tensor (Rabenseifner 2004). Not recorded by autograd. Raises `InvalidRankError` for a root that
    does not exist, `UnsupportedOperationError` if the reduction has no meaning for the dtype;
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return _start(
        tensor,
        backend,
        root,
        op,
        algorithm=algorithm,
        reproducible=reproducible,
        into=into,
        timeout=timeout,
    ).wait()


def async_reduce(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor | None]:
    """`reduce` that returns at once; `wait()` gives the result on the root, None elsewhere."""
    return _start(
        tensor,
        backend,
        root,
        op,
        algorithm=algorithm,
        reproducible=reproducible,
        into=into,
        timeout=timeout,
        background=True,
    )


def reduce_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> Tensor:
    """`reduce` in place: the root's `tensor` is overwritten, the others' is not; it is returned."""
    return _start_in_place(
        tensor,
        backend,
        root,
        op,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    ).wait()


def async_reduce_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`reduce_` that returns at once; the root's `tensor` holds the result after `wait()`."""
    return _start_in_place(
        tensor,
        backend,
        root,
        op,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def _start(
    tensor: Tensor,
    backend: Backend,
    root: int,
    op: ReduceOp,
    *,
    algorithm: str,
    reproducible: bool,
    into: Tensor | None,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor | None]:
    plan = _planned(tensor, backend, root, op, algorithm, reproducible=reproducible)
    if backend.rank == root:
        work, result = fresh(tensor, backend, into, "reduce")
        return launch(plan, work, backend, result, timeout=timeout, background=background)
    work = _contribution(tensor, plan, backend)
    return launch(plan, work, backend, lambda: None, timeout=timeout, background=background)


def _start_in_place(
    tensor: Tensor,
    backend: Backend,
    root: int,
    op: ReduceOp,
    *,
    algorithm: str,
    reproducible: bool,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor]:
    plan = _planned(tensor, backend, root, op, algorithm, reproducible=reproducible)
    if backend.rank == root:
        prepared = in_place(tensor)
    else:
        prepared = Prepared(_contribution(tensor, plan, backend), lambda: tensor)
    work, result = prepared
    return launch(plan, work, backend, result, timeout=timeout, background=background)


def _planned(
    tensor: Tensor,
    backend: Backend,
    root: int,
    op: ReduceOp,
    algorithm: str,
    *,
    reproducible: bool,
) -> Plan:
    check_tensor(tensor, backend, "reduce")
    return planned(
        "reduce",
        tuple(tensor.shape),
        tensor.dtype,
        backend,
        op=op,
        root=root,
        algorithm=algorithm,
        reproducible=reproducible,
    )


def _contribution(tensor: Tensor, plan: Plan, backend: Backend) -> Tensor:
    """What a rank that gets no result works on: its own tensor, if that stays as it is."""
    if not plan.overwrites:
        return plain(tensor)
    work = backend.empty(*tensor.shape, dtype=tensor.dtype)
    copy_bits(work, tensor)
    return work
