"""broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.prepare import Prepared, check_tensor, empty, fresh, in_place
from phalanx.collectives.run import start


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
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`
    into        where to put the result, of the same shape and dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result (the root: until its sends are done). A binomial tree
    sends the tensor at most ceil(log2 p) times from any of p ranks, a ring about once. Raises
    `InvalidRankError` for a root that does not exist, `CollectiveTimeoutError`, `PeerLostError`,
    `DesyncError`.
    """
    return _start(
        _result(tensor, backend, root, into),
        backend,
        root,
        algorithm=algorithm,
        timeout=timeout,
    ).wait()


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
    return _start(
        _result(tensor, backend, root, into),
        backend,
        root,
        algorithm=algorithm,
        timeout=timeout,
        background=True,
    )


def broadcast_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Tensor:
    """`broadcast` in place: `tensor` is overwritten on all ranks but the root, and returned."""
    return _start(
        _in_place(tensor, backend),
        backend,
        root,
        algorithm=algorithm,
        timeout=timeout,
    ).wait()


def async_broadcast_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`broadcast_` that returns at once; `tensor` holds the result after `wait()`."""
    return _start(
        _in_place(tensor, backend),
        backend,
        root,
        algorithm=algorithm,
        timeout=timeout,
        background=True,
    )


def _result(tensor: Tensor, backend: Backend, root: int, into: Tensor | None) -> Prepared:
    if backend.rank == root:
        return fresh(tensor, backend, into, "broadcast")
    check_tensor(tensor, backend, "broadcast")
    return empty(tuple(tensor.shape), tensor.dtype, backend, into, "broadcast")


def _in_place(tensor: Tensor, backend: Backend) -> Prepared:
    check_tensor(tensor, backend, "broadcast_")
    return in_place(tensor)


def _start(
    prepared: Prepared,
    backend: Backend,
    root: int,
    *,
    algorithm: str,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor]:
    return start(
        "broadcast",
        prepared,
        backend,
        root=root,
        algorithm=algorithm,
        timeout=timeout,
        background=background,
    )
