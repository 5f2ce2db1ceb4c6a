"""gather: the root gets all ranks' tensors, joined along the first dimension."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.memory import plain
from phalanx.collectives.checks import check_tensor
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.run import run, start
from phalanx.collectives.task import Task, given, out_for


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
    task = _task(tensor, backend, root, into)
    return run(task, backend, algorithm=algorithm, timeout=timeout)


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
    task = _task(tensor, backend, root, into)
    return start(task, backend, algorithm=algorithm, timeout=timeout, background=True)


def _task(tensor: Tensor, backend: Backend, root: int, into: Tensor | None) -> Task[Tensor | None]:
    backend.check_rank(root, "root")
    check_tensor(tensor, backend, "gather")
    rows = tensor.shape[0] if tensor.dim() else 1
    shape = (backend.world_size * rows, *tensor.shape[1:])
    if backend.rank != root:
        return Task("gather", shape, tensor.dtype, plain(tensor), None, lambda: None, root=root)
    out, result = out_for(shape, tensor.dtype, backend, into, "gather", device=tensor.device)
    source = given(tensor, out, same=out[root * rows : (root + 1) * rows])
    return Task("gather", shape, tensor.dtype, source, out, result, root=root)
