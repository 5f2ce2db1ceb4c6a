"""all_gather: every rank gets all ranks' tensors, joined along the first dimension."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.run import check_into, finish_into, start


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
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`
    into        where to put the result, of that shape and the same dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result. A ring sends p-1 times the tensor's bytes from each of p
    ranks, which is optimal. Raises `SizeMismatchError` if `into` does not fit,
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return _start(tensor, backend, algorithm, into, timeout, False).wait()


def async_all_gather(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_gather` that returns at once; `wait()` gives the result."""
    return _start(tensor, backend, algorithm, into, timeout, True)


def _start(
    tensor: Tensor,
    backend: Backend,
    algorithm: str,
    into: Tensor | None,
    timeout: float | None,
    background: bool,
) -> PendingCollective[Tensor]:
    size = backend.world_size
    rows = tensor.shape[0] if tensor.dim() else 1
    shape = (size * rows, *tensor.shape[1:])
    check_into(into, shape, tensor.dtype, backend, "all_gather")
    if into is not None and into.is_contiguous():
        work = into.detach()
    else:
        work = backend.empty(*shape, dtype=tensor.dtype)
    own = work[backend.rank * rows : (backend.rank + 1) * rows]
    own.copy_(tensor.detach() if tensor.dim() else tensor.detach().reshape(1))
    return start(
        "all_gather",
        work,
        backend,
        lambda: finish_into(into, work) if into is not None else work,
        algorithm=algorithm,
        timeout=timeout,
        background=background,
    )
