"""reduce_scatter: every rank gets its slice of the reduction of all ranks' tensors."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.reduce_op import ReduceOp, reduction_for
from phalanx.collectives.run import Prepared, check_into, finish_into, fresh, start
from phalanx.errors import SizeMismatchError


def reduce_scatter(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Slice `rank` of the reduction of every rank's `tensor`.

    tensor      of the same shape and dtype on every rank; not changed. Its dim 0 has to be
                divisible by the world size: `[p * n, ...]` gives `[n, ...]`
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`
    into        where to put the result, of that shape and the same dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has its slice. A ring sends (p-1)/p of the tensor's bytes from each of
    p ranks, which is optimal. Raises `SizeMismatchError` before anything is sent if dim 0 does not
    divide or `into` does not fit; `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return _start(tensor, backend, op, algorithm=algorithm, into=into, timeout=timeout).wait()


def async_reduce_scatter(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`reduce_scatter` that returns at once; `wait()` gives the result."""
    return _start(
        tensor, backend, op, algorithm=algorithm, into=into, timeout=timeout, background=True
    )


def _start(
    tensor: Tensor,
    backend: Backend,
    op: ReduceOp,
    *,
    algorithm: str,
    into: Tensor | None,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor]:
    reduction_for(op, tensor.dtype)
    size = backend.world_size
    if not tensor.dim() or tensor.shape[0] % size:
        raise SizeMismatchError(
            f"rank {backend.rank}: reduce_scatter cuts dim 0 into {size} slices, one for each "
            f"rank, and cannot cut a tensor of shape {list(tensor.shape)}; pad dim 0 to a multiple "
            f"of {size}",
            rank=backend.rank,
            op="reduce_scatter",
        )
    rows = tensor.shape[0] // size
    check_into(into, (rows, *tensor.shape[1:]), tensor.dtype, backend, "reduce_scatter")
    work = fresh(tensor, backend, None, "reduce_scatter").work
    own = work[backend.rank * rows : (backend.rank + 1) * rows]
    return start(
        "reduce_scatter",
        # Cloned, so that the other ranks' slices do not stay in memory with it.
        Prepared(work, lambda: own.clone() if into is None else finish_into(into, own)),
        backend,
        op=op,
        algorithm=algorithm,
        timeout=timeout,
        background=background,
    )
