"""Which address of this host the others can reach."""

from __future__ import annotations

import socket

from phalanx.wire.address import is_loopback

__all__ = ["ELSEWHERE", "address_toward"]

ELSEWHERE = ("192.0.2.1", 9)
"""An address that belongs to nobody (RFC 5737): the route to it is the default route."""


def address_toward(host: str, port: int, *, one_host: bool) -> str:
    """Return the address of this host at which ranks that know it by way of `host` reach it.

    That is the address of the interface that leads to `host`. A host's own name often means
    loopback to itself: with ranks on other hosts, the interface of the default route is taken.
    Nothing is sent. `OSError` where `host` cannot be resolved or reached.
    """
    if one_host:
        return "127.0.0.1"
    own = _source_address(host, port)
    return _source_address(*ELSEWHERE) if is_loopback(own) else own


def _source_address(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # datagrams: this looks up the route and sends nothing
        return str(probe.getsockname()[0])
