"""broadcast_object: every rank gets the root's object."""

from __future__ import annotations

from phalanx.backends.base import Backend
from phalanx.collectives.object_messages import encoded, move
from phalanx.collectives.pending import PendingCollective

NAME = "broadcast_object"


def broadcast_object(
    obj: object, backend: Backend, root: int = 0, *, timeout: float | None = None
) -> object:
    """The object of rank `root`, on every rank.

    obj         what `all_gather_object` takes; only the root's matters, the others may give None
    root        the rank whose object it is; the same on every rank
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the object, which is a new one, on the root too. Moves its bytes like
    `broadcast`, after those of its length. Raises as `all_gather_object` does, on the root, and
    `InvalidRankError` for a root that does not exist.
    """
    return _start(obj, backend, root, timeout=timeout).wait()


def async_broadcast_object(
    obj: object, backend: Backend, root: int = 0, *, timeout: float | None = None
) -> PendingCollective[object]:
    """`broadcast_object` that returns at once; `obj` may be changed from then on."""
    return _start(obj, backend, root, timeout=timeout, background=True)


def _start(
    obj: object,
    backend: Backend,
    root: int,
    *,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[object]:
    backend.check_rank(root, "root")
    mine = encoded(obj, backend, NAME) if backend.rank == root else None
    pending = move(
        "broadcast", NAME, mine, backend, root=root, timeout=timeout, background=background
    )
    return pending.giving(lambda: pending.wait()[0])
