"""all_gather_object: every rank gets every rank's object."""

from __future__ import annotations

from phalanx.backends.base import Backend
from phalanx.collectives.object_messages import encoded, move
from phalanx.collectives.pending import PendingCollective

NAME = "all_gather_object"


def all_gather_object(
    obj: object, backend: Backend, *, timeout: float | None = None
) -> list[object]:
    """Every rank's `obj`, as a list in rank order.

    obj         None, bool, int, float, str, bytes, a tensor on the CPU, or a list, tuple or dict of
                such; another one on each rank, if you like
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has all objects, which are new ones, its own too. Types survive, tensors
    arrive contiguous and without a gradient, and nothing is pickled. Moves the objects' bytes like
    `all_gather`, after a round of their lengths. Raises `UnsupportedObjectError` (a TypeError and
    an `UnsupportedOperationError`), naming the part, such as `obj["a"][3]`, of an object that
    cannot be sent: of another type, a subclass of these types, containing itself, nested more than
    100 deep. The others learn of it, and the group is broken. `CollectiveTimeoutError`,
    `PeerLostError`, `DesyncError`.
    """
    mine = encoded(obj, backend, NAME)
    return move("all_gather", NAME, mine, backend, timeout=timeout, background=False).wait()


def async_all_gather_object(
    obj: object, backend: Backend, *, timeout: float | None = None
) -> PendingCollective[list[object]]:
    """`all_gather_object` that returns at once; `obj` may be changed from then on."""
    mine = encoded(obj, backend, NAME)
    return move("all_gather", NAME, mine, backend, timeout=timeout, background=True)
