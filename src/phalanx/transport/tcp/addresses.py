"""The addresses at which this process listens, and at which others reach it.

    PHALANX_INTERFACE   the interface (`eth1`), or a network that has an address of each host
                        (`10.0.0.0/8`, `fd00::/16`), at which ranks listen
    PHALANX_PORTS       the ports at which they listen (`30000-30100`)

                        unset                                   set
    ranks of one host   127.0.0.1                               127.0.0.1
    others              at the address that leads to rank 0     at that of PHALANX_INTERFACE
    port                any free one                            the first free one of PHALANX_PORTS

An address that was given (MASTER_ADDR, --master, `TcpBackend(master_addr)`) is where rank 0, or the
launcher's store, listens; the interface decides where it is a name that means loopback here.

In the end: the owner of the process at the other end of a connection inside this host (`stranger`).
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import re
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from phalanx.errors import BackendUnavailableError, MisuseError
from phalanx.wire.control import Endpoint, is_loopback

INTERFACE, PORTS = "PHALANX_INTERFACE", "PHALANX_PORTS"

# An address that belongs to nobody (RFC 5737): the route to it is the default route.
ELSEWHERE = Endpoint("192.0.2.1", 9)

BACKLOG = 4096
"""Calls that the kernel keeps until they are looked at; it keeps fewer where it is told to
(net.core.somaxconn)."""

SocketAddress = tuple[int, tuple[object, ...]]  # family, and what `bind` and `connect` take


def resolve(endpoint: Endpoint, *, numeric: bool = False) -> list[SocketAddress]:
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
            f"the host name in {endpoint} (MASTER_ADDR) cannot be resolved on this host: "
            f"{error.strerror or error}"
        ) from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


# ------------------------------------------------------------------------------
# At which address others reach this host.


def address_toward(host: str, port: int, *, one_host: bool) -> str:
    """Return the address of this host at which ranks that know it by way of `host` reach it.

    That is the address of PHALANX_INTERFACE; without one, of the interface that leads to `host`. A
    host's own name often means loopback to itself: with ranks on other hosts, the interface of the
    default route is taken. Nothing is sent. `OSError` where `host` cannot be resolved or reached.
    """
    if one_host:
        return "127.0.0.1"
    try:
        own = _source_address(host, port)
        own = _source_address(*ELSEWHERE) if is_loopback(own) else own
    except OSError:
        if not chosen_interfaces():
            raise
        own = ""
    return address_on_interface(own)


def _source_address(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # datagrams: this looks up the route and sends nothing
        return str(probe.getsockname()[0])


class Interface(NamedTuple):
    """An address of this host, and the name of the interface that has it."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} {self.address}"


def address_on_interface(own: str = "") -> str:
    """Return `own`, an address of this host, unless PHALANX_INTERFACE says another one.

    Of several addresses of that interface it is the first of the same family; without `own` it is
    an IPv4 one, if there is one.
    """
    chosen = [one.address for one in chosen_interfaces()]
    if not chosen or own in chosen:
        return own
    return min(chosen, key=lambda address: (":" in address) != (":" in own))


def chosen_interfaces() -> list[Interface]:
    """Return the addresses that PHALANX_INTERFACE allows: none if it is not set.

    Raises `BackendUnavailableError`, which names this host's interfaces, for any other.
    """
    text = os.environ.get(INTERFACE, "").strip()
    if not text:
        return []
    network, known = _network(text), interfaces()
    found = [
        one
        for one in known
        if (one.name == text if network is None else ipaddress.ip_address(one.address) in network)
    ]
    if not found:
        what = f"no interface {text!r}" if network is None else f"no address in {network}"
        here = ", ".join(map(str, known)) or "no address at all"
        raise BackendUnavailableError(
            f"{INTERFACE}={text}: the host {socket.gethostname()} has {what}; it has {here}. "
            f"Set {INTERFACE} to the name of one of these, or to a network that has an address of "
            "each host, such as 10.0.0.0/8"
        )
    return found


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the network that is written there; None for the name of an interface."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        if "/" not in text:  # as no name has
            return None
        raise MisuseError(
            f"{INTERFACE}={text} is neither the name of an interface, such as eth1, nor a network, "
            f"such as 10.0.0.0/8 ({error})"
        ) from None


def interfaces() -> list[Interface]:
    """Return the addresses of this host's interfaces that are up, as the system lists them."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "the system does not list its interfaces")
    found, at = [], first.value
    try:
        while at:
            listed = _Listed.from_address(at)
            address = _address_at(listed.address) if listed.flags & _UP else ""
            if address:
                found.append(Interface(os.fsdecode(listed.name), address))
            at = listed.next
    finally:
        libc.freeifaddrs(first)
    return found


def with_interface(address: str) -> str:
    """Return an address of this host behind the name of its interface, where that is known."""
    with suppress(OSError, AttributeError):  # of a system that does not list them
        return next((str(one) for one in interfaces() if one.address == address), address)
    return address


_UP = 1  # IFF_UP


class _Listed(ctypes.Structure):
    """`struct ifaddrs`, as far as it is needed: the same on Linux and macOS."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def _address_at(place: int | None) -> str:
    """Return the address in the `struct sockaddr` at this place; "" for one of no use to others.

    Such is one that holds on one link only (fe80::).
    """
    if not place:
        return ""
    # BSD, and so macOS, puts the structure's length before a family of one byte.
    family = (
        ctypes.c_uint16.from_address(place).value
        if sys.platform == "linux"
        else ctypes.c_uint8.from_address(place + 1).value
    )
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(place + 4, 4))
    if family == socket.AF_INET6:
        number = ipaddress.IPv6Address(ctypes.string_at(place + 8, 16))
        return "" if number.is_link_local else str(number)
    return ""


# ------------------------------------------------------------------------------
# The sockets that listen.


def listen_at(family: int, address: tuple[object, ...], *, backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that listens there, and only there. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_on(host: str, *scope: object) -> socket.socket:
    """Return a socket that listens at an address of this host, at a port of PHALANX_PORTS.

    `scope` holds an IPv6 address's fields beside host and port. Raises OSError, and
    `BackendUnavailableError` if none of the ports is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = allowed_ports()
    for port in ports:
        try:
            return listen_at(family, (host, port, *scope))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or ports == _ANY:
                raise
    raise BackendUnavailableError(
        f"{PORTS}={os.environ[PORTS]}: every port of it is in use at {host}. Each rank of a host "
        "needs one of its own while the ranks meet, and beyond 16 ranks until it ends: give more "
        "ports, or end what holds them (ss -ltnp shows it)"
    )


def listen_toward(toward: Endpoint, *, one_host: bool) -> tuple[socket.socket, Endpoint]:
    """Return, for rank 0, a socket that listens at `address_toward`, and its endpoint."""
    try:
        host = address_toward(*toward, one_host=one_host)
        listener = listen_on(host)
    except OSError as error:
        raise BackendUnavailableError(
            f"rank 0 found no address at which other ranks reach it by way of {toward.host!r} "
            f"({error}): is the name right (MASTER_ADDR), and the network up? {INTERFACE} says "
            "which one to take",
            rank=0,
        ) from error
    return listener, Endpoint(host, listener.getsockname()[1])


_ANY = range(1)  # port 0: the system gives a free one


def allowed_ports() -> range:
    """Return the ports of PHALANX_PORTS. `MisuseError` where it is no range of ports."""
    text = os.environ.get(PORTS, "").strip()
    if not text:
        return _ANY
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    if match is not None:
        low, high = int(match[1]), int(match[2] or match[1])
        if 0 < low <= high < 65536:
            return range(low, high + 1)
    raise MisuseError(
        f"{PORTS}={text} is no range of ports: the first and the last one, from 1 to 65535, such "
        f"as {PORTS}=30000-30100"
    )


def reserve_port() -> socket.socket:
    """Return a socket that is bound to a port of all interfaces, and keeps it free: it does not
    listen. It is the last free one of PHALANX_PORTS, as ranks take the first, or else any one.
    """
    every = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    for port in (*reversed(allowed_ports()), 0):
        holder = socket.socket(every[0], socket.SOCK_STREAM)
        try:
            if every[0] == socket.AF_INET6:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            holder.bind((every[1], port))
        except OSError:
            holder.close()
        else:
            return holder
    raise BackendUnavailableError("no port of this host is free: end what holds them (ss -ltnp)")


def check_listening(ranks: int = 1) -> None:
    """Raise what is wrong with the two variables for so many ranks of this host."""
    chosen_interfaces()
    ports = allowed_ports()
    if ports != _ANY and len(ports) < ranks:
        raise MisuseError(
            f"{PORTS}={os.environ[PORTS]} has fewer ports than this host has ranks, {ranks}, each "
            "of which needs one of its own: give more"
        )


def listen_as_master(endpoint: Endpoint) -> socket.socket:
    """Return rank 0's listener. Raise if the port is taken, or the address is another host's.

    A name that means loopback to its own host, as many do, and all interfaces (0.0.0.0) stand for
    the address of PHALANX_INTERFACE, if that is set.
    """
    addresses = resolve(endpoint)
    chosen = [] if is_loopback(endpoint.host) else [one.address for one in chosen_interfaces()]
    if chosen:
        here = [str(address[0]) for _, address in addresses]
        if all(is_loopback(host) or host in ("0.0.0.0", "::") for host in here):
            addresses = resolve(Endpoint(address_on_interface(), endpoint.port), numeric=True)
        addresses = [each for each in addresses if each[1][0] in chosen]
        if not addresses:
            raise BackendUnavailableError(
                f"rank 0 is called at {endpoint} (MASTER_ADDR), which is {here[0]}, and "
                f"{INTERFACE}={os.environ[INTERFACE]} says that it listens at {chosen[0]}: set "
                f"MASTER_ADDR to {chosen[0]}, or {INTERFACE} to the network of MASTER_ADDR",
                rank=0,
            )
    problem: OSError | None = None
    for family, address in addresses:
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


# ------------------------------------------------------------------------------
# Whose process is at the other end of a connection inside this host.
#
# The kernel knows which user's process holds a socket. It is asked for the one at the other end,
# whose local address is our remote one and the other way round: by sock_diag(7), in 10 us; where
# there is none, in /proc/net/tcp, which takes milliseconds, and more with many sockets.
#
# A socket that no process holds has no inode, and counts as root's there: one that its process has
# closed, or whose call its process has not accepted yet.

_End: TypeAlias = "tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]"  # address, port
_Holder: TypeAlias = "tuple[int, int]"  # user, inode


def stranger(sock: socket.socket) -> str:
    """Return why the process at the other end of a connection is not let in without a token.

    "" for a process of this user or of root. If the system does not show its owner, it is not let
    in: launchers make a token, and a job that is started by hand can be given one.

    Ask when the other end has answered: before it has accepted the call, nobody holds its socket.
    """
    uid, own = uid_of_peer(sock), os.geteuid()
    if uid in (own, 0):
        return ""
    whose = "the system does not show whose process it is" if uid is None else f"it is user {uid}'s"
    return (
        f"{whose}, and without a token only processes of this user, {own}, are let in: set "
        "PHALANX_TOKEN to the same secret on every rank"
    )


def uid_of_peer(sock: socket.socket) -> int | None:
    """Return the user whose process holds the other end of a connection inside this host.

    None where the system does not show it, and where no process holds it (any more, or yet).
    """
    try:
        theirs, ours = _end(sock.getpeername()), _end(sock.getsockname())
    except OSError:  # it is closed
        return None
    found = _ask_kernel(theirs, ours)
    if found is None and _ask_kernel(ours, theirs) is None:  # it does not answer at all
        found = _read_table(theirs, ours)
    return found[0] if found is not None and found[1] else None


def _end(name: tuple[str, int]) -> _End:
    """An end of a connection; that of IPv4 also where the socket is one of both families."""
    number = ipaddress.ip_address(name[0].partition("%")[0])
    return getattr(number, "ipv4_mapped", None) or number, name[1]


# `struct nlmsghdr`, `struct inet_diag_req_v2`; and where user and inode are in `inet_diag_msg`.
_QUESTION = struct.Struct("=IHHII BBBxI 2s2s16s16sI8s")
_SOCK_DIAG, _REQUEST, _ANY_STATE, _NO_COOKIE = 20, 1, 0xFFFFFFFF, b"\xff" * 8
_ANSWER = struct.Struct("=4xH11xB62xII")
_LISTENS = 10  # TCP_LISTEN: no such connection, but somebody waits for one


def _ask_kernel(local: _End, remote: _End) -> _Holder | None:
    """Return the holder of the socket with these addresses; None without one, or an answer."""
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    ports = (end[1].to_bytes(2, "big") for end in (local, remote))
    question = _QUESTION.pack(
        *(_QUESTION.size, _SOCK_DIAG, _REQUEST, 0, 0),
        *(family, socket.IPPROTO_TCP, 0, _ANY_STATE),
        *(*ports, local[0].packed, remote[0].packed, 0, _NO_COOKIE),
    )
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:  # NETLINK_SOCK_DIAG
            kernel.send(question)
            kind, state, uid, inode = _ANSWER.unpack_from(kernel.recv(4096))
    except (OSError, AttributeError, struct.error):  # no Linux; it does not say; an error is short
        return None
    return (uid, inode) if kind == _SOCK_DIAG and state != _LISTENS else None


def _read_table(local: _End, remote: _End) -> _Holder | None:
    """Read it from the tables of all sockets; one for both families stands with mapped numbers."""
    for table, prefix in (("tcp", b""), ("tcp6", b"\0" * 10 + b"\xff\xff")):
        wanted = []
        for number, port in (local, remote):
            packed = (prefix if number.version == 4 else b"") + number.packed
            text = "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))
            wanted.append(f"{text}:{port:04X}")
        with suppress(OSError):
            for row in Path("/proc/net", table).read_text().splitlines():
                words = row.split()
                if words[1:3] == wanted:
                    return int(words[7]), int(words[9])
    return None
