"""all_gather: every rank gets all ranks' tensors, joined along the first dimension."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.checks import check_tensor
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.run import run, start
from phalanx.collectives.task import Task, given, out_for


def all_gather(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Every rank's `tensor`, joined along dim 0 in rank order.

    tensor      of the same shape and dtype on every rank; not changed. `[n, ...]` gives
                `[world_size * n, ...]`; a tensor of no dimensions gives `[world_size]`
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    into        where to put the result, of that shape and the same dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result. A ring sends p-1 times the tensor's bytes from each of p
    ranks, which is optimal. Raises `SizeMismatchError` if `into` does not fit,
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    task = _task(tensor, backend, into)
    return run(task, backend, algorithm=algorithm, timeout=timeout)


def async_all_gather(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_gather` that returns at once; `wait()` gives the result."""
    task = _task(tensor, backend, into)
    return start(task, backend, algorithm=algorithm, timeout=timeout, background=True)


def _task(tensor: Tensor, backend: Backend, into: Tensor | None) -> Task[Tensor]:
    check_tensor(tensor, backend, "all_gather")
    rank = backend.rank
    rows = tensor.shape[0] if tensor.dim() else 1
    shape = (backend.world_size * rows, *tensor.shape[1:])
    out, result = out_for(shape, tensor.dtype, backend, into, "all_gather", device=tensor.device)
    source = given(tensor, out, same=out[rank * rows : (rank + 1) * rows])
    return Task("all_gather", shape, tensor.dtype, source, out, result)
