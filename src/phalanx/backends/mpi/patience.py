"""Waiting for MPI, which moves bytes only when it is called, and knows no deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from time import monotonic

SPINS = 200  # looks one after the other: most of what is waited for comes within this
YIELDING = 0.005  # seconds of looks between which other processes may run
PAUSE = 50e-6  # seconds between looks after that
BUSY = 10e-6  # seconds: a look that takes longer has moved bytes


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Call `done` until it is true or so many seconds have passed; whether it is.

    First without a pause; then letting others have the core, which may be those waited for; and
    when nothing has moved for a while, with short sleeps.
    """
    for _ in range(SPINS):
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
