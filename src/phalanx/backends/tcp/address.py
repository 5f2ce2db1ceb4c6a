"""The sockets that listen at an address, and the ways to reach one."""

from __future__ import annotations

import errno
import socket

from phalanx.errors import BackendUnavailableError
from phalanx.wire.address import Endpoint

BACKLOG = 4096
"""Calls that the kernel keeps until they are looked at; it keeps fewer where it is told to
(net.core.somaxconn)."""


def resolve(endpoint: Endpoint, *, numeric: bool = False) -> list[tuple[int, tuple[object, ...]]]:
    """The (family, socket address) pairs under which a host may be reached.

    A name is looked up, which may block, unless `numeric`: then it is an error, as is a name that
    nobody knows.
    """
    flags = socket.AI_NUMERICHOST if numeric else 0
    try:
        found = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=flags
        )
    except OSError as error:
        raise BackendUnavailableError(
            f"the host name in {endpoint} cannot be resolved: {error.strerror or error}"
        ) from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


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
