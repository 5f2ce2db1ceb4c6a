"""gather: the root gets all ranks' tensors, joined along the first dimension."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.prepare import check_tensor, copy_bits, empty, plain
from phalanx.collectives.run import launch, planned


def gather(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor | None:
    """Every rank's `tensor`, joined along dim 0 in rank order, on rank `root`; None on the others.

    tensor      of the same shape and dtype on every rank; not changed. `[n, ...]` gives
                `[world_size * n, ...]`; a tensor of no dimensions gives `[world_size]`
    root        the rank that gets the result; the same on every rank
    algorithm   `auto`, or `tree`, `star`
    into        where the root puts the result, of that shape and the same dtype; else a new tensor.
                The other ranks need not give it, and leave it alone
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until the root has the result; the others, until their part is done. The root receives
    p-1 times the tensor's bytes, which is the least there is: as p-1 messages (star), or as
    ceil(log2 p) messages from ranks that have collected those of others (binomial tree). Raises
    `InvalidRankError` for a root that does not exist, `SizeMismatchError` if `into` does not fit,
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    return _start(tensor, backend, root, algorithm=algorithm, into=into, timeout=timeout).wait()


def async_gather(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor | None]:
    """`gather` that returns at once; `wait()` gives the result on the root, None elsewhere."""
    return _start(
        tensor, backend, root, algorithm=algorithm, into=into, timeout=timeout, background=True
    )


def _start(
    tensor: Tensor,
    backend: Backend,
    root: int,
    *,
    algorithm: str,
    into: Tensor | None,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor | None]:
    check_tensor(tensor, backend, "gather")
    own = tensor if tensor.dim() else tensor.reshape(1)
    rows = own.shape[0]
    shape = (backend.world_size * rows, *own.shape[1:])
    plan = planned("gather", shape, own.dtype, backend, root=root, algorithm=algorithm)
    if backend.rank == root:
        work, result = empty(shape, own.dtype, backend, into, "gather")
        copy_bits(work[root * rows : (root + 1) * rows], own)
        return launch(plan, work, backend, result, timeout=timeout, background=background)
    work = plain(own)
    if plan.work_size > own.nbytes:  # other ranks' tensors pass through this one
        work = backend.empty(plan.work_size // own.itemsize, dtype=own.dtype)
        copy_bits(work[: own.numel()].view(own.shape), own)
    return launch(plan, work, backend, lambda: None, timeout=timeout, background=background)
