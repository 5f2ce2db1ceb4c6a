"""all_gather: every rank gets all ranks' tensors, joined along the first dimension."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.prepare import check_tensor, copy_bits, empty
from phalanx.collectives.run import start


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
    return _start(tensor, backend, algorithm=algorithm, into=into, timeout=timeout).wait()


def async_all_gather(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_gather` that returns at once; `wait()` gives the result."""
    return _start(tensor, backend, algorithm=algorithm, into=into, timeout=timeout, background=True)


def _start(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str,
    into: Tensor | None,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor]:
    check_tensor(tensor, backend, "all_gather")
    rank = backend.rank
    rows = tensor.shape[0] if tensor.dim() else 1
    shape = (backend.world_size * rows, *tensor.shape[1:])
    prepared = empty(shape, tensor.dtype, backend, into, "all_gather")
    own = prepared.work[rank * rows : (rank + 1) * rows]
    copy_bits(own, tensor if tensor.dim() else tensor.reshape(1))
    return start(
        "all_gather",
        prepared,
        backend,
        algorithm=algorithm,
        timeout=timeout,
        background=background,
    )
