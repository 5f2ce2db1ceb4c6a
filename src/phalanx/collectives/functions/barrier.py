"""barrier: no rank leaves it before every rank has come."""

from __future__ import annotations

from phalanx.backends.base import Backend
from phalanx.collectives.pending import PendingCollective


def barrier(backend: Backend, *, timeout: float | None = None) -> None:
    """Block until every rank of the group has called this.

    Two waves round a ring, 2p messages of no bytes. Raises `CollectiveTimeoutError` naming a rank
    that has not come, `PeerLostError`, `DesyncError`.
    """
    backend.barrier(timeout=timeout)


def async_barrier(backend: Backend, *, timeout: float | None = None) -> PendingCollective[None]:
    """`barrier` that returns at once; `wait()` returns when every rank has called it."""
    operation = backend.start_barrier(timeout=timeout, background=True)
    return PendingCollective(backend, operation, lambda: None)
