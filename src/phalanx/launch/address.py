"""Addresses: how they are written, and which one of this host's the others can reach."""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["address_toward", "is_loopback", "join_address", "split_address"]

_ELSEWHERE = ("192.0.2.1", 9)
"""An address that belongs to nobody (RFC 5737): the route to it is the default route."""


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of `host:port` or `[host]:port`; else `ValueError`."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    wrong_host = not bare or (":" in bare and bare == host) or bare.strip() != bare
    wrong_port = not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536
    if not colon or wrong_host or wrong_port:
        raise ValueError("an address is host:port, such as node1:29500 or [fd00::1]:29500")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host` is written as an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_toward(host: str, port: int, *, one_host: bool) -> str:
    """Return the address of this host at which ranks that know it by way of `host` reach it.

    That is the address of the interface that leads to `host`. A host's own name often means
    loopback to itself: with ranks on other hosts, the interface of the default route is taken.
    Nothing is sent. `OSError` where `host` cannot be resolved or reached.
    """
    if one_host:
        return "127.0.0.1"
    own = _source_address(host, port)
    return _source_address(*_ELSEWHERE) if is_loopback(own) else own


def _source_address(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # datagrams: this looks up the route and sends nothing
        return str(probe.getsockname()[0])
