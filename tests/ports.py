"""A port for a program that has to be told one before it listens."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000  # below are ports of services


def unused_port() -> int:
    """A port that nobody listens on, and that no other program on this host is given by chance.

    It is below those that the system chooses from for port 0 and for outgoing connections: between
    this look and the program's own, many processes of other tests are given such ones.
    """
    beyond = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    while True:
        port = _FIRST + secrets.randbelow(beyond - _FIRST)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
