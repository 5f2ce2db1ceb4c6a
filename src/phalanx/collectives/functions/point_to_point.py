"""Messages between two ranks, as functions beside the collectives."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.memory import Buffer


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
    into: Tensor | Buffer, src: int, backend: Backend, *, tag: int = 0, timeout: float | None = None
) -> None:
    """Receive from rank `src` into `into`, which is filled whole; see `Backend.recv`."""
    backend.recv(into, src, tag=tag, timeout=timeout)


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
