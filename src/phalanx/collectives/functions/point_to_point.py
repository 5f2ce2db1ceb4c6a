"""Messages between two ranks, as functions beside the collectives."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.memory import Buffer
from phalanx.collectives.pending import PendingCollective


def send(
    tensor: Tensor | Buffer,
    dst: int,
    backend: Backend,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> None:
    """Send `tensor` to rank `dst`; see `Backend.send`."""
    backend.send(tensor, dst, tag=tag, timeout=timeout)


def recv(
    into: Tensor | Buffer,
    src: int | None,
    backend: Backend,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> int:
    """Receive from rank `src`, or with `None` from any, into `into`, which is filled whole.

    Returns the sender; see `Backend.recv`.
    """
    return backend.recv(into, src, tag=tag, timeout=timeout)


def isend(
    tensor: Tensor | Buffer,
    dst: int,
    backend: Backend,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> PendingCollective[None]:
    """`send` that returns at once; the tensor's memory may be used again after `wait()`."""
    operation = backend.start_send(tensor, dst, tag=tag, timeout=timeout, background=True)
    return PendingCollective(backend, operation, lambda: None)


def irecv(
    into: Tensor | Buffer,
    src: int | None,
    backend: Backend,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> PendingCollective[int]:
    """`recv` that returns at once; `wait()` gives the sender, and `into` is filled then.

    Receives with one tag from one rank are served in the order in which they were posted.
    """
    operation, finish = backend.start_recv(into, src, tag=tag, timeout=timeout, background=True)
    return PendingCollective(backend, operation, finish)


def sendrecv(
    tensor: Tensor | Buffer,
    dst: int,
    into: Tensor | Buffer,
    src: int,
    backend: Backend,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> None:
    """Send to `dst` and receive from `src` at the same time; see `Backend.sendrecv`."""
    backend.sendrecv(tensor, dst, into, src, tag=tag, timeout=timeout)
