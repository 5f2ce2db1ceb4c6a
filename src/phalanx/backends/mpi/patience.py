"""Waiting for MPI, which moves bytes only when it is called, and knows no deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from time import monotonic

YIELDING = 0.005  # seconds of looks between which other processes may run
PAUSE = 50e-6  # seconds between looks after that
BUSY = 10e-6  # seconds: a look that takes longer has moved bytes


def looks_at_once(ranks_here: int) -> int:
    """How many looks to take one after the other, with so many ranks on this host.

    Where each has a core of its own, nobody is kept from anything; else a rank that looks keeps
    another one from doing what it looks for.
    """
    return 3000 if ranks_here <= (os.cpu_count() or 1) else 50


def wait_until(done: Callable[[], bool], seconds: float, looks: int = 50) -> bool:
    """Call `done` until it is true or so many seconds have passed; whether it is.

    First so many times without a pause; then letting others have the core, which may be those
    waited for; and when nothing has moved for a while, with short sleeps.
    """
    for _ in range(looks):
        if done():
            return True
    now = moved = monotonic()
    deadline = now + seconds
    while now < deadline:
        if now - moved < YIELDING:
            os.sched_yield()
        else:
            time.sleep(PAUSE)
        looked = monotonic()
        if done():
            return True
        now = monotonic()
        if now - looked > BUSY:
            moved = now
    return False
