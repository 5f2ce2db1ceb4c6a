"""Addresses of TCP: "host:port", "[ipv6]:port", and the sockets that listen there."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import NamedTuple

from phalanx.errors import BackendUnavailableError

BACKLOG = 1024


class Endpoint(NamedTuple):
    """A host, as a name or a number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Endpoint:
    """`"host:port"`; an IPv6 number stands in brackets: `"[::1]:29500"`."""
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed) or not port.isascii():
        raise ValueError(
            f'"{text}" is not an address; it looks like "host:29500", "192.0.2.7:29500" or '
            f'"[2001:db8::7]:29500"'
        )
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f'"{text}" is not an address: its port is a number from 1 to 65535')
    return Endpoint(host, int(port))


def resolve(endpoint: Endpoint) -> list[tuple[int, tuple[object, ...]]]:
    """The (family, socket address) pairs under which a host may be reached."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BackendUnavailableError(
            f"the host name in {endpoint} cannot be resolved: {error.strerror or error}"
        ) from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def is_loopback(host: str) -> bool:
    """Whether a numeric address stays on this host."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def listen_at(family: int, address: tuple[object, ...]) -> socket.socket:
    """A socket that listens there, and only there. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_as_master(endpoint: Endpoint) -> socket.socket:
    """The listener of rank 0. Says so if the port is taken, or the address is another host's."""
    problem: OSError | None = None
    for family, address in resolve(endpoint):
        try:
            return listen_at(family, address)
        except OSError as error:
            problem = error
    assert problem is not None
    if problem.errno == errno.EADDRINUSE:
        raise BackendUnavailableError(
            f"rank 0 cannot listen at {endpoint}: the port is in use, perhaps by another job or "
            "one that has not ended; end it, or choose another port (MASTER_PORT)",
            rank=0,
        ) from problem
    raise BackendUnavailableError(
        f"rank 0 cannot listen at {endpoint}: {problem.strerror}; the address has to be one of the "
        "host on which rank 0 runs (MASTER_ADDR)",
        rank=0,
    ) from problem
