"""Memory fences: in which order one processor sees what another has written."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable


def make_fence() -> Callable[[], object]:
    """A full memory fence: what is written before it is seen before what is read after it.

    Taking a lock is one: on x86-64 it is an instruction that locks the bus, behind which no load
    passes a store. Elsewhere taking a lock only keeps what follows behind it, and giving it back
    what went before in front; so it takes two locks, one after the other, as between the release of
    the first and the acquisition of the second nothing moves either way (Arm's load-acquire is not
    reordered with an earlier store-release).
    """
    lock, second = threading.Lock(), threading.Lock()

    def fence() -> None:
        with lock:
            pass

    def fence_of_two() -> None:
        with lock:
            pass
        with second:
            pass

    return fence if keeps_order() else fence_of_two


def keeps_order() -> bool:
    """Whether this processor shows stores to others in the order in which they were made.

    x86-64 does (total store order), and does not reorder loads either: data, then a flag; the flag,
    then data, needs nothing in between. Only a load may pass an earlier store to another place.
    """
    return platform.machine() in ("x86_64", "AMD64")


def make_order() -> Callable[[], object]:
    """What has to stand between two stores, or two loads, that others must not see reversed."""
    return _nothing if keeps_order() else make_fence()


def _nothing() -> None:
    pass
