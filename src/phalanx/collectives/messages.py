"""Messages between two ranks, as functions beside the collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.collectives.request import PendingCollective, check_backend
from phalanx.core.backend import Backend
from phalanx.core.call import check_timeout
from phalanx.core.work import AnyOf
from phalanx.wire.memory import Buffer


def send(
    tensor: Tensor | Buffer,
    backend: Backend,
    dst: int,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> None:
    """Send `tensor` to rank `dst`; see `Backend.send`."""
    check_backend(backend, "send(tensor, backend, dst)", dst)
    backend.send(tensor, dst, tag=tag, timeout=timeout)


def recv(
    into: Tensor | Buffer,
    backend: Backend,
    src: int | None,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> int:
    """Receive from rank `src`, or with `None` from any, into `into`, which is filled whole.

    Returns the sender; see `Backend.recv`.
    """
    check_backend(backend, "recv(into, backend, src)", src)
    return backend.recv(into, src, tag=tag, timeout=timeout)


def isend(
    tensor: Tensor | Buffer,
    backend: Backend,
    dst: int,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> PendingCollective[None]:
    """`send` that returns at once; the tensor's memory may be used again after `wait()`."""
    check_backend(backend, "isend(tensor, backend, dst)", dst)
    return backend.isend(tensor, dst, tag=tag, timeout=timeout)


def irecv(
    into: Tensor | Buffer,
    backend: Backend,
    src: int | None,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> PendingCollective[int]:
    """`recv` that returns at once; `wait()` gives the sender, and `into` is filled then.

    Receives with one tag from one rank are served in the order in which they were posted.
    """
    check_backend(backend, "irecv(into, backend, src)", src)
    return backend.irecv(into, src, tag=tag, timeout=timeout)


def sendrecv(
    tensor: Tensor | Buffer,
    backend: Backend,
    dst: int,
    into: Tensor | Buffer,
    src: int,
    *,
    tag: int = 0,
    timeout: float | None = None,
) -> None:
    """Send to `dst` and receive from `src` at the same time; see `Backend.sendrecv`."""
    check_backend(backend, "sendrecv(tensor, backend, dst, into, src)", src)
    backend.sendrecv(tensor, dst, into, src, tag=tag, timeout=timeout)


# ------------------------------------------------------------------------------
# `wait_any`: block until one of several collectives or messages is done.


def wait_any(pending: Sequence[PendingCollective[Any]], *, timeout: float | None = None) -> int:
    """Block until one of them is done, or has failed; return the place of the first that is.

    pending   collectives and messages of one rank, of any groups of one world
    timeout   seconds; by default there is none but those that each was issued with

    Nothing is taken, and nothing is raised, that is its own `wait()`'s: call that next. When
    `timeout` passes, `CollectiveTimeoutError` names whom all of them wait for, and they go on as if
    this had not been called. The thread sleeps meanwhile, and moves what can be moved. No bytes of
    its own. ValueError for none, and for those of several ranks.
    """
    if not pending:
        raise ValueError("wait_any of nothing would wait for ever")
    seconds = math.inf if timeout is None else check_timeout(timeout)
    AnyOf(pending[0].group, pending, seconds).wait()
    return next(place for place, each in enumerate(pending) if each.over)


# ------------------------------------------------------------------------------
# barrier: no rank leaves it before every rank has entered.


def barrier(backend: Backend, *, label: str = "", timeout: float | None = None) -> None:
    """Block until every rank of the group has called this, with the same label.

    Two waves round a ring, 2p messages of no bytes. Raises `CollectiveTimeoutError` naming a rank
    that has not come, `PeerLostError`, `DesyncError`.
    """
    backend.barrier(label=label, timeout=timeout)


def async_barrier(
    backend: Backend, *, label: str = "", timeout: float | None = None
) -> PendingCollective[None]:
    """`barrier` that returns at once; `wait()` returns when every rank has called it."""
    return backend.ibarrier(label=label, timeout=timeout)
