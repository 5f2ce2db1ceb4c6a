"""Where this process listens, as the kernel sees it: `/proc/net/tcp` and `/proc/self/fd`."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

LISTEN = "0A"
Place = tuple[str, int]  # host, port

needs_proc = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="needs Linux, which shows who listens where"
)


def listening(pid: str = "self") -> set[Place]:
    """Every address and port at which that process accepts connections."""
    ours = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                ours.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in ours:
                host, _, port = fields[1].partition(":")
                found.add((_host(host), int(port, 16)))
    return found


def _host(digits: str) -> str:
    """The kernel prints an address as 32-bit words in the host's byte order."""
    words = [
        int(digits[n : n + 8], 16).to_bytes(4, sys.byteorder) for n in range(0, len(digits), 8)
    ]
    return str(ipaddress.ip_address(b"".join(words)))


def everywhere(places: set[Place]) -> set[Place]:
    """Those of them that are on all interfaces."""
    return {place for place in places if ipaddress.ip_address(place[0]).is_unspecified}


def let_mean_loopback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose own name means loopback to itself, as some distributions set it up."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *a, **k: real("127.0.1.1" if host == name else host, *a, **k),
    )
