"""Whether this host's cores are short: what waits for a peer then waits for its turn on a core."""

from __future__ import annotations

import os

EVERY = 0.02  # seconds between looks, which take some 10 us, and more from a cold cache
MOST = 4  # looks by which those that say so outnumber the others


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
    """Whether a host's cores are short for a while: a look every 20 ms, and what most of them say.

    Beside one busy process seven of ten looks say so, and one of ten on an idle machine. The state
    changes when four more say so than not, or the other way round.
    """

    def __init__(self) -> None:
        self._crowded = False
        self._level = 0
        self._next_look = 0.0

    def at(self, now: float) -> bool:
        """Return whether it is so, with a look if it is time to."""
        if now >= self._next_look:
            self._next_look = now + EVERY
            step = 1 if is_crowded() else -1
            self._level = min(max(self._level + step, 0), MOST)
            if self._level in (0, MOST):
                self._crowded = self._level == MOST
        return self._crowded
