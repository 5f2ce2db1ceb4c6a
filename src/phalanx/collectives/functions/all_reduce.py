"""all_reduce: every rank gets the reduction of all ranks' tensors."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.checks import check_tensor
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.reduce_op import ReduceOp
from phalanx.collectives.run import run, start
from phalanx.collectives.task import Task, given, in_place, out_for


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
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where to put the result, of the same shape and dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result. A ring sends 2(p-1)/p of the tensor's bytes from each
    of p ranks (Patarasuk & Yuan 2009), which is optimal. Not recorded by autograd. Raises
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`; `UnsupportedOperationError` if the
    reduction has no meaning for the dtype.
    """
    return run(
        _task(tensor, backend, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


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
    return start(
        _task(tensor, backend, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


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
    return run(
        _in_place(tensor, backend, op),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


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
    return start(
        _in_place(tensor, backend, op),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def _task(tensor: Tensor, backend: Backend, op: ReduceOp, into: Tensor | None) -> Task[Tensor]:
    check_tensor(tensor, backend, "all_reduce")
    shape = tuple(tensor.shape)
    out, result = out_for(shape, tensor.dtype, backend, into, "all_reduce", device=tensor.device)
    source = given(tensor, out, same=out)
    return Task("all_reduce", shape, tensor.dtype, source, out, result, op)


def _in_place(tensor: Tensor, backend: Backend, op: ReduceOp) -> Task[Tensor]:
    check_tensor(tensor, backend, "all_reduce_")
    return in_place("all_reduce", tensor, op=op)
