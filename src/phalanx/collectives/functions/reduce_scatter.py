"""reduce_scatter: every rank gets its slice of the reduction of all ranks' tensors."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.prepare import (
    Prepared,
    check_into,
    check_slices,
    check_tensor,
    finish_into,
    fresh,
)
from phalanx.collectives.reduce_op import ReduceOp
from phalanx.collectives.run import start


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
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`
    reproducible  sum in rank order, whatever the backend and the size (it selects `direct`)
    into        where to put the result, of that shape and the same dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has its slice. A ring sends (p-1)/p of the tensor's bytes from each of
    p ranks, which is optimal. Raises `SizeMismatchError` before anything is sent if dim 0 does not
    divide or `into` does not fit; `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return _start(
        tensor,
        backend,
        op,
        algorithm=algorithm,
        reproducible=reproducible,
        into=into,
        timeout=timeout,
    ).wait()


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
    return _start(
        tensor,
        backend,
        op,
        algorithm=algorithm,
        reproducible=reproducible,
        into=into,
        timeout=timeout,
        background=True,
    )


def _start(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp,
    *,
    algorithm: str,
    reproducible: bool,
    into: Tensor | None,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor]:
    check_tensor(tensor, backend, "reduce_scatter")
    shape = check_slices(tuple(tensor.shape), backend, "reduce_scatter")
    check_into(into, shape, tensor.dtype, backend, "reduce_scatter")
    work = fresh(tensor, backend, None, "reduce_scatter").work
    own = work[backend.rank * shape[0] : (backend.rank + 1) * shape[0]]
    return start(
        "reduce_scatter",
        # Cloned, so that the other ranks' slices do not stay in memory with it.
        Prepared(work, lambda: own.clone() if into is None else finish_into(into, own)),
        backend,
        op=op,
        algorithm=algorithm,
        reproducible=reproducible,
        timeout=timeout,
        background=background,
    )
