"""all_to_all: every rank sends every rank a slice of its own."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.checks import check_slices, check_tensor
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.run import run, start
from phalanx.collectives.task import Task, given, out_for


def all_to_all(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Slice `rank` of every rank's `tensor`, joined along dim 0 in rank order.

    tensor      of the same shape and dtype on every rank; not changed. Its dim 0 has to be
                divisible by the world size: slice i of it goes to rank i
    algorithm   `auto`; or `direct`, all pairs at once; or `pairwise`, one after the other
    into        where to put the result, of the same shape and dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result. Every rank sends and receives (p-1)/p of the tensor's
    bytes, which is the least there is, as p-1 messages (Thakur et al. 2005). Raises
    `SizeMismatchError` before anything is sent if dim 0 does not divide or `into` does not fit;
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    task = _task(tensor, backend, into)
    return run(task, backend, algorithm=algorithm, timeout=timeout)


def async_all_to_all(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_to_all` that returns at once; `wait()` gives the result."""
    task = _task(tensor, backend, into)
    return start(task, backend, algorithm=algorithm, timeout=timeout, background=True)


def _task(tensor: Tensor, backend: Backend, into: Tensor | None) -> Task[Tensor]:
    check_tensor(tensor, backend, "all_to_all")
    shape = tuple(tensor.shape)
    check_slices(shape, backend, "all_to_all")
    out, result = out_for(shape, tensor.dtype, backend, into, "all_to_all", device=tensor.device)
    return Task("all_to_all", shape, tensor.dtype, given(tensor, out), out, result)
