"""Whether this host's cores are short: what waits for a peer then waits for its turn on a core."""

from __future__ import annotations

import os


def is_crowded() -> bool:
    """Return whether more threads than cores of this host run or want to, at this moment.

    False if the kernel does not say. It takes some 10 us.
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
