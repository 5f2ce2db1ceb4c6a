"""Which host this is, and how its processes are."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_NAMESPACES = ("net", "pid")  # containers that share neither are hosts of their own


def host_id() -> str:
    """The same for all processes of one host, and different between hosts."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in _NAMESPACES]
    except OSError:
        return socket.gethostname()
    return " ".join([boot, *spaces])


def process_id() -> int:
    """This process, for others of this host to look at; 0 if they could not (`is_stopped`)."""
    return os.getpid() if Path("/proc/self/stat").exists() else 0


def is_stopped(process: int) -> bool:
    """Whether a process of this host is stopped, or traced and held. False if it is gone."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    state = status[status.rindex(b")") + 2 :][:1]  # behind the name, which may hold anything
    return state in (b"T", b"t")
