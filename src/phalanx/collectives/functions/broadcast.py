"""broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.checks import check_tensor
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.run import run, start
from phalanx.collectives.task import Task, given, in_place, out_for


def broadcast(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The tensor of rank `root`, on every rank.

    tensor      of the same shape and dtype on every rank; only the root's values matter
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    into        where to put the result, of the same shape and dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result (the root: until its sends are done). A binomial tree
    sends the tensor at most ceil(log2 p) times from any of p ranks, a ring about once. Raises
    `InvalidRankError` for a root that does not exist, `CollectiveTimeoutError`, `PeerLostError`,
    `DesyncError`.
    """
    return run(_task(tensor, backend, root, into), backend, algorithm=algorithm, timeout=timeout)


def async_broadcast(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`broadcast` that returns at once; `wait()` gives the result."""
    task = _task(tensor, backend, root, into)
    return start(task, backend, algorithm=algorithm, timeout=timeout, background=True)


def broadcast_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Tensor:
    """`broadcast` in place: `tensor` is overwritten on all ranks but the root, and returned."""
    return run(_in_place(tensor, backend, root), backend, algorithm=algorithm, timeout=timeout)


def async_broadcast_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`broadcast_` that returns at once; `tensor` holds the result after `wait()`."""
    task = _in_place(tensor, backend, root)
    return start(task, backend, algorithm=algorithm, timeout=timeout, background=True)


def _task(tensor: Tensor, backend: Backend, root: int, into: Tensor | None) -> Task[Tensor]:
    check_tensor(tensor, backend, "broadcast")
    shape = tuple(tensor.shape)
    out, result = out_for(shape, tensor.dtype, backend, into, "broadcast", device=tensor.device)
    source = given(tensor, out, same=out) if backend.rank == root else None
    return Task("broadcast", shape, tensor.dtype, source, out, result, root=root)


def _in_place(tensor: Tensor, backend: Backend, root: int) -> Task[Tensor]:
    check_tensor(tensor, backend, "broadcast_")
    task = in_place("broadcast", tensor, root=root)
    if backend.rank != root:
        task.source = None
    return task
