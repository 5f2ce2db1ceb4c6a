"""Whether this host's cores are short: what waits for a peer then waits for its turn on a core."""

from __future__ import annotations

import os

EVERY = 0.002  # seconds between looks: one takes some 10 us


def is_crowded() -> bool:
    """Return whether more threads than cores of this host run or want to, at this moment.

    False if the kernel does not say.
    """
    try:
        file = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        running = os.read(file, 64).split()[3].partition(b"/")[0]
    finally:
        os.close(file)
    return int(running) > (os.cpu_count() or 1)


class Crowding:
    """`is_crowded` for those who ask often: a look every 2 ms."""

    def __init__(self) -> None:
        self._crowded = False
        self._next_look = 0.0

    def at(self, now: float) -> bool:
        """Return whether it was so at the last look, which is this one if it is time to."""
        if now >= self._next_look:
            self._next_look = now + EVERY
            self._crowded = is_crowded()
        return self._crowded
