"""all_to_all: every rank sends every rank a slice of its own."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.prepare import (
    check_into,
    check_slices,
    check_tensor,
    copy_bits,
    empty,
    outgoing,
)
from phalanx.collectives.run import launch, planned


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
    return _start(tensor, backend, algorithm=algorithm, into=into, timeout=timeout).wait()


def async_all_to_all(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_to_all` that returns at once; `wait()` gives the result."""
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
    check_tensor(tensor, backend, "all_to_all")
    shape = tuple(tensor.shape)
    rows = check_slices(shape, backend, "all_to_all")[0]
    check_into(into, shape, tensor.dtype, backend, "all_to_all")
    plan = planned("all_to_all", shape, tensor.dtype, backend, algorithm=algorithm)
    source = outgoing(tensor, into)
    work, result = empty(shape, tensor.dtype, backend, into, "all_to_all")
    own = slice(backend.rank * rows, (backend.rank + 1) * rows)
    copy_bits(work[own], source[own])
    return launch(
        plan, work, backend, result, source=source, timeout=timeout, background=background
    )
