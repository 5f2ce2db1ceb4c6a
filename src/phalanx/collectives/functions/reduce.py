"""reduce: the root gets the reduction of all ranks' tensors."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.memory import plain
from phalanx.collectives.checks import check_tensor
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.reduce_op import ReduceOp
from phalanx.collectives.run import run, start
from phalanx.collectives.task import Task, given, in_place, out_for


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
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
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
    return run(
        _task(tensor, backend, root, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


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
    return start(
        _task(tensor, backend, root, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
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
    return run(
        _in_place(tensor, backend, root, op),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


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
    return start(
        _in_place(tensor, backend, root, op),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def _task(
    tensor: Tensor, backend: Backend, root: int, op: ReduceOp, into: Tensor | None
) -> Task[Tensor | None]:
    backend.check_rank(root, "root")
    check_tensor(tensor, backend, "reduce")
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if backend.rank != root:
        return Task("reduce", shape, dtype, plain(tensor), None, lambda: None, op, root)
    out, result = out_for(shape, dtype, backend, into, "reduce", device=tensor.device)
    return Task("reduce", shape, dtype, given(tensor, out, same=out), out, result, op, root)


def _in_place(tensor: Tensor, backend: Backend, root: int, op: ReduceOp) -> Task[Tensor]:
    backend.check_rank(root, "root")
    check_tensor(tensor, backend, "reduce_")
    if backend.rank == root:
        return in_place("reduce", tensor, op=op, root=root)
    source = plain(tensor)
    return Task("reduce", tuple(tensor.shape), tensor.dtype, source, None, lambda: tensor, op, root)
