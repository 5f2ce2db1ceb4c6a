"""all_reduce: every rank gets the reduction of all ranks' tensors."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.reduce_op import ReduceOp, reduction_for
from phalanx.collectives.run import check_into, contiguous_copy, finish_into, in_place, start
from phalanx.errors import UnsupportedOperationError


def all_reduce(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The reduction of every rank's `tensor`, bit for bit the same on all of them.

    tensor      of the same shape and dtype on every rank; not changed
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where to put the result, of the same shape and dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result. A ring sends 2(p-1)/p of the tensor's bytes from each
    of p ranks (Patarasuk & Yuan 2009), which is optimal. Not recorded by autograd. Raises
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`; `UnsupportedOperationError` if the
    reduction has no meaning for the dtype.
    """
    return _start(tensor, backend, op, algorithm, reproducible, into, timeout, False).wait()


def async_all_reduce(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_reduce` that returns at once; `wait()` gives the result."""
    return _start(tensor, backend, op, algorithm, reproducible, into, timeout, True)


def all_reduce_(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> Tensor:
    """`all_reduce` in place: `tensor` is overwritten, and returned. Half the memory traffic."""
    return _start_in_place(tensor, backend, op, algorithm, reproducible, timeout, False).wait()


def async_all_reduce_(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_reduce_` that returns at once; `tensor` holds the result after `wait()`."""
    return _start_in_place(tensor, backend, op, algorithm, reproducible, timeout, True)


def _start(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp,
    algorithm: str,
    reproducible: bool,
    into: Tensor | None,
    timeout: float | None,
    background: bool,
) -> PendingCollective[Tensor]:
    reduction_for(op, tensor.dtype)
    check_into(into, tuple(tensor.shape), tensor.dtype, backend, "all_reduce")
    work = contiguous_copy(tensor, backend, into)
    return start(
        "all_reduce",
        work,
        backend,
        lambda: finish_into(into, work) if into is not None else work,
        op=op,
        algorithm=_reproducible(algorithm, backend) if reproducible else algorithm,
        timeout=timeout,
        background=background,
    )


def _start_in_place(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp,
    algorithm: str,
    reproducible: bool,
    timeout: float | None,
    background: bool,
) -> PendingCollective[Tensor]:
    reduction_for(op, tensor.dtype)
    work = in_place(tensor)
    return start(
        "all_reduce",
        work,
        backend,
        lambda: finish_into(tensor, work),
        op=op,
        algorithm=_reproducible(algorithm, backend) if reproducible else algorithm,
        timeout=timeout,
        background=background,
    )


def _reproducible(algorithm: str, backend: Backend) -> str:
    if algorithm not in ("auto", "direct"):
        raise UnsupportedOperationError(
            f"rank {backend.rank}: all_reduce: reproducible=True sums in rank order, which "
            f"{algorithm!r} does not; leave out algorithm=, or ask for 'direct'",
            rank=backend.rank,
            op="all_reduce",
        )
    return "direct"
