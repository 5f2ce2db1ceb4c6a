"""Addresses as text: `host:port`, with an IPv6 number in brackets: `[fd00::1]:29500`."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

__all__ = ["Endpoint", "is_loopback", "parse_address"]


class Endpoint(NamedTuple):
    """A host, as a name or a number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Endpoint:
    """What `text` says. Raises ValueError unless it is `host:port` or `[host]:port`."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    wrong_host = not bare or (":" in bare and bare == host) or bare.strip() != bare
    wrong_port = not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536
    if not colon or wrong_host or wrong_port:
        raise ValueError(
            f'"{text}" is not an address: an address is host:port, such as node1:29500, '
            "192.0.2.7:29500 or [fd00::1]:29500"
        )
    return Endpoint(bare, int(port))


def is_loopback(host: str) -> bool:
    """Whether `host` is written as one that only this machine can reach."""
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    # How a socket of both families shows a caller over IPv4: ::ffff:127.0.0.1.
    mapped = getattr(number, "ipv4_mapped", None)
    return (mapped or number).is_loopback
