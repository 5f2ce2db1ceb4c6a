"""Which host this is."""

from __future__ import annotations

import socket
from pathlib import Path


def host_id() -> str:
    """The same for all processes of one host, and different between hosts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
