"""reduce_scatter: every rank gets its slice of the reduction of all ranks' tensors."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.checks import check_slices, check_tensor
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.reduce_op import ReduceOp
from phalanx.collectives.run import run, start
from phalanx.collectives.task import Task, given, out_for


def reduce_scatter(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Slice `rank` of the reduction of every rank's `tensor`.

    tensor      of the same shape and dtype on every rank; not changed. Its dim 0 has to be
                divisible by the world size: `[p * n, ...]` gives `[n, ...]`
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where to put the result, of that shape and the same dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has its slice. A ring sends (p-1)/p of the tensor's bytes from each of
    p ranks, which is optimal. Raises `SizeMismatchError` before anything is sent if dim 0 does not
    divide or `into` does not fit; `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return run(
        _task(tensor, backend, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
    )


def async_reduce_scatter(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    reproducible: bool = False,
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`reduce_scatter` that returns at once; `wait()` gives the result."""
    return start(
        _task(tensor, backend, op, into),
        backend,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=True,
    )


def _task(tensor: Tensor, backend: Backend, op: ReduceOp, into: Tensor | None) -> Task[Tensor]:
    check_tensor(tensor, backend, "reduce_scatter")
    whole = tuple(tensor.shape)
    shape = check_slices(whole, backend, "reduce_scatter")
    out, result = out_for(
        shape, tensor.dtype, backend, into, "reduce_scatter", device=tensor.device
    )
    return Task("reduce_scatter", whole, tensor.dtype, given(tensor, out), out, result, op)
