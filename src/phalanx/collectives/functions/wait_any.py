"""`wait_any`: go on when one of several collectives or messages is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from phalanx.collectives.pending import PendingCollective


def wait_any(pending: Sequence[PendingCollective[Any]], *, timeout: float | None = None) -> int:
    """Block until one of them is done, or has failed; return the place of the first that is.

    pending   collectives and messages of one rank, of any groups of one world
    timeout   seconds; by default there is none but those that each was issued with

    Nothing is taken, and nothing is raised, that is its own `wait()`'s: call that next. When
    `timeout` passes, `CollectiveTimeoutError` names whom all of them wait for, and they go on as if
    this had not been called. The thread sleeps meanwhile, and moves what can be moved. No bytes of
    its own. ValueError for none, and for those of several ranks.
    """
    backends = [each._backend for each in pending]
    if any(backend.engine is not backends[0].engine for backend in backends):
        raise ValueError("wait_any takes what one rank waits for: these are of several ranks")
    operations = [each._operation for each in pending]
    if not operations:
        raise ValueError("wait_any of nothing would wait for ever")
    backends[0].wait_any(operations, timeout=math.inf if timeout is None else timeout)
    return next(place for place, each in enumerate(operations) if each.done)
