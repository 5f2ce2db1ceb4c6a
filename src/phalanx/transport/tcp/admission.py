"""The acceptor: incoming connections, until they are authenticated.

An unauthenticated connection, one whose handshake is not complete, may cost

    memory       1 KiB in this process: its socket, its place in the tables, one message of the
                 handshake (not the kernel's own buffers, which the kernel bounds)
    time         2 s of this rank's attention, however much it sends
    a place      of 128, and one for each rank; the oldest of those that have said the least gives
                 way to the next caller, also when there is no file descriptor left
    a log line   of ten in full, then only a count

No name is looked up. A rank of the job that has to give way connects again (`Dial`).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.errors import AuthenticationError, BackendUnavailableError
from phalanx.wire.control import Endpoint, is_loopback
from phalanx.wire.handshake import ROOM, AcceptorHandshake, Handshake, Refused

if TYPE_CHECKING:  # the command line reads the token, and does not wait for torch
    from phalanx.transport.tcp.connection import MeshBase

# ------------------------------------------------------------------------------
# Rejected connections: logged in full at first, then counted.
#
# A port scanner must not fill a disk, nor hide the rank with the wrong token between its lines. So
# callers that claim to be a rank are counted apart.

log = logging.getLogger("phalanx")

TOLD_IN_FULL = 10  # lines of each kind; then one for the 10th, 100th, 1000th ...


class Rejections:
    """Counts, logs, and keeps what a timeout quotes in `mesh.last_rejection`."""

    def __init__(self, mesh: MeshBase) -> None:
        self.mesh = mesh
        self.unauthenticated = 0
        self.ranks = 0
        self._last_rank = ""

    def add(self, what: str, *, rank: int | None) -> None:
        """A caller was refused that claimed to be `rank` (None: it has claimed nothing)."""
        if rank is None:
            self.unauthenticated += 1
            number, kind = self.unauthenticated, "unauthenticated callers"
            before = f"; before that {self._last_rank}" if self._last_rank else ""
        else:
            self.ranks += 1
            number, kind = self.ranks, "callers that said which rank they are"
            before, self._last_rank = "", what
        if number <= TOLD_IN_FULL:
            self.mesh.turned_away(what)
        elif _is_power_of_ten(number):
            log.warning(
                "rank %d turned away %d %s so far, the last of them %s",
                self.mesh.rank,
                number,
                kind,
                what,
            )
        self.mesh.last_rejection = what + before

    def total(self) -> None:
        """The acceptor closes: log how many there were, if not each of them was logged."""
        if max(self.unauthenticated, self.ranks) > TOLD_IN_FULL:
            log.warning(
                "rank %d turned away %d unauthenticated callers and %d that said which rank they "
                "are while its job formed",
                self.mesh.rank,
                self.unauthenticated,
                self.ranks,
            )


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"


# ------------------------------------------------------------------------------
# A connection in its handshake, on either side.

HUNG_UP = "the connection was closed during the handshake"


# TCP resends within a second after a short outage (TCP_RTO_MAX_MS: Linux 6.15, uapi tcp.h).
TCP_RTO_MAX_MS = 44
LONGEST_RETRANSMIT = 1000  # milliseconds, the least that the kernel takes


class Handshaking:
    """A non-blocking socket, and the handshake that goes over it."""

    __slots__ = ("handshake", "mesh", "sock")

    handshake: Handshake

    def __init__(self, mesh: MeshBase, sock: socket.socket) -> None:
        self.mesh = mesh
        self.sock = sock
        sock.setblocking(False)

    def read(self, room: int) -> bytes | None:
        """Received bytes, `room` at most; None: nothing yet. `Refused` at the connection's end."""
        try:
            data = self.sock.recv(room)
        except BlockingIOError:
            return None
        except OSError as error:
            log.debug("a connection broke during the handshake: %s", error)
            raise Refused(HUNG_UP, final=False) from None
        if not data:
            raise Refused(HUNG_UP, final=False)
        return data

    def send(self, data: bytes) -> None:
        """Send bytes. Raises `Refused` if the socket does not take them all."""
        # A handshake is a few hundred bytes: an empty socket buffer takes them.
        try:
            if data and self.sock.send(data) != len(data):
                raise Refused("the connection does not take the handshake", final=False)
        except OSError as error:
            log.debug("a connection broke during the handshake: %s", error)
            raise Refused(HUNG_UP, final=False) from None

    def say_farewell(self) -> None:
        """Send the other side the reason for its rejection, if possible."""
        if self.handshake.farewell:
            try:
                self.sock.send(self.handshake.farewell)
            except OSError:
                log.debug("a refused peer had gone already")

    def hang_up(self) -> None:
        """Close the connection."""
        self.mesh.reactor.forget(self.sock)
        self.sock.close()

    def open(self) -> None:
        """The peer is authenticated: hand the socket to the mesh."""
        with suppress(OSError):  # a connection that is broken already is noticed later
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # an older kernel
            self.sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_RETRANSMIT)
        peer = self.handshake.peer
        assert peer is not None
        self.mesh.link_opened(peer, self.sock, self.handshake.surplus)


# ------------------------------------------------------------------------------

PATIENCE = 2.0  # seconds within which a caller has to be authenticated
TICK = 0.1  # seconds between checks of that
TICKS = round(PATIENCE / TICK)
PLACES = 128  # callers in their handshake at a time, beside one for each rank
CALLS_AT_A_TIME = 32  # fewer than the places, so that a caller is read before it gives way
REST = 0.1  # seconds without accepting, when there are no resources for it

_OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Errors that accept() raises on Linux for the pending connection, not for the listener.
_OF_THE_CALLER = frozenset(
    {
        errno.ECONNABORTED,
        errno.ENETDOWN,
        errno.EPROTO,
        errno.ENOPROTOOPT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EOPNOTSUPP,
        errno.ENETUNREACH,
        errno.EPERM,
        getattr(errno, "ENONET", errno.ENETDOWN),
    }
)


class Acceptor:
    """A listener: every caller becomes a `PendingConnection`. Opened to form the group, then
    closed.

    All methods are called with the engine's lock held; none blocks.
    """

    def __init__(self, mesh: MeshBase, listener: socket.socket) -> None:
        self.mesh = mesh
        self.listener = listener
        self.pending: dict[PendingConnection, None] = {}  # in the order in which they came
        self.places = PLACES + mesh.world_size
        self.rejections = Rejections(mesh)
        self.admit = mesh.admit  # one bound method for all pending connections
        self.now = (
            0  # ticks that this rank has seen; none while it computes: callers then have to wait
        )
        self._ticking = False
        self._open = True
        listener.setblocking(False)
        with suppress(OSError):
            listener.listen(BACKLOG)  # unauthenticated callers must not fill the queue
        mesh.reactor.watch(listener, self._on_ready)

    def close(self) -> None:
        """Stop listening, and drop the connections that are not authenticated."""
        self._open = False
        self.mesh.reactor.forget(self.listener)
        self.listener.close()
        for pending in list(self.pending):
            self.drop(pending)
        self.rejections.total()

    def drop(self, pending: PendingConnection) -> None:
        """Close a pending connection."""
        self.pending.pop(pending, None)
        pending.hang_up()

    def _on_ready(self, readable: bool, writable: bool) -> None:
        for _ in range(CALLS_AT_A_TIME):
            try:
                sock, address = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OF_THE_CALLER:
                    continue
                if error.errno in _OUT_OF and self.pending:
                    # A quarter of them, not one: this rank needs some for its own calls.
                    self.places = 3 * len(self.pending) // 4
                    self._make_room(self.places)
                    continue
                self._rest(error)
                return
            self._begin_handshake(sock, str(address[0]))

    def _begin_handshake(self, sock: socket.socket, host: str) -> None:
        if self.mesh.loopback_only and not is_loopback(host):
            sock.close()
            reason = "without a token (PHALANX_TOKEN) only this host is let in"
            self.rejections.add(f"{host}: {reason}", rank=None)
            return
        self._make_room(max(self.places - 1, 0))
        pending = PendingConnection(self, sock, host)
        self.pending[pending] = None
        pending.hear()  # now, so that it does not count as silent when the next one comes
        if not self._ticking:
            self._ticking = True
            self.mesh.reactor.call_later(TICK, self._tick)

    def _make_room(self, most: int) -> None:
        """Close pending connections until there are `most`."""
        while len(self.pending) > most:
            silent = (pending for pending in self.pending if not pending.auth_state)
            pending = next(silent, None) or min(
                self.pending, key=lambda pending: pending.auth_state
            )
            pending.turn_away("had to give way to other callers before it had proved itself")

    def _tick(self) -> None:
        # What callers have sent was read before: sockets come before timers in every turn. And
        # after a long absence this rank counts one tick, not many.
        self.now += 1
        for pending in list(self.pending):
            if pending.born + TICKS > self.now:
                break
            did = "did not prove itself" if pending.auth_state else "was silent"
            pending.turn_away(f"{did} for {PATIENCE:g} s")
        self._ticking = bool(self.pending)
        if self._ticking:
            self.mesh.reactor.call_later(TICK, self._tick)

    def _rest(self, error: OSError) -> None:
        """No connection can be accepted now, and none can be dropped: try later, do not spin."""
        reason = f"{error.strerror or error}"
        if error.errno in _OUT_OF:
            reason += "; this process may need more (ulimit -n)"
        self.rejections.add(f"a caller, whom it could not accept: {reason}", rank=None)
        self.mesh.reactor.forget(self.listener)
        self.mesh.reactor.call_later(REST, self._look_again)

    def _look_again(self) -> None:
        if self._open:
            self.mesh.reactor.watch(self.listener, self._on_ready)


class PendingConnection(Handshaking):
    """A caller. `auth_state`: 0 has sent nothing, 1 has sent something, 2 was challenged."""

    __slots__ = ("acceptor", "auth_state", "born", "host")

    def __init__(self, acceptor: Acceptor, sock: socket.socket, host: str) -> None:
        super().__init__(acceptor.mesh, sock)
        self.acceptor = acceptor
        self.host = host
        self.born = acceptor.now
        self.auth_state = 0
        self.mesh.reactor.watch(sock, self._on_ready)

    def hear(self) -> None:
        """Read what the caller has sent, if anything, and answer."""
        try:
            data = self.read(self.handshake.room if self.auth_state else ROOM)
            if data is None:
                return
            self._answer(data)
        except Refused as refusal:
            if refusal.reason == HUNG_UP:  # no line in the log: port scanners do it all the time
                self.acceptor.drop(self)
                return
            self.say_farewell()
            self.turn_away(refusal.reason)

    def turn_away(self, reason: str) -> None:
        """Close the connection, and log the reason."""
        rank = self.handshake.peer if self.auth_state else None
        who = self.host if rank is None else f"{self.host}, as rank {rank}"
        self.acceptor.rejections.add(f"{who}: {reason}", rank=rank)
        self.acceptor.drop(self)

    def _on_ready(self, readable: bool, writable: bool) -> None:
        self.hear()

    def _answer(self, data: bytes) -> None:
        mesh = self.mesh
        if not self.auth_state:  # most silent callers stay silent: they cost no handshake
            self.handshake = AcceptorHandshake(mesh.identity, mesh.token, self.acceptor.admit)
            self.auth_state = 1
        self.send(self.handshake.receive(data))
        if self.handshake.peer is not None:
            self.auth_state = 2
        if self.handshake.complete:
            self.acceptor.pending.pop(self, None)
            self.open()


# ------------------------------------------------------------------------------
# The job's token: the secret that all its ranks hold.
#
#     PHALANX_TOKEN        the token itself
#     PHALANX_TOKEN_FILE   a file that holds it, which only its owner may read (chmod 600)
#
# Never on a command line, which everybody on the host can read, and never in a message, whoever it
# is for: errors here say how long a token is, at most.

LEAST_BYTES = 16  # 128 bits, if they are random
MOST_BYTES = 4096
MAKE_ONE = 'python -c "import secrets; print(secrets.token_hex(32))"'


def find_token(environ: Mapping[str, str] = os.environ) -> str:
    """Return the token that the environment gives, or ""; PHALANX_TOKEN goes before the file.

    The file's content counts without white space at its ends. `AuthenticationError` when the file
    cannot be read, is readable for others than its owner, or belongs to somebody else, and when
    the token is shorter than 128 bits.
    """
    token = environ.get("PHALANX_TOKEN", "")
    if token:
        return check_token(token, "PHALANX_TOKEN")
    path = environ.get("PHALANX_TOKEN_FILE", "")
    if path:
        return check_token(_read(path), f"the token in {path} (PHALANX_TOKEN_FILE)")
    return ""


def check_token(token: str, name: str) -> str:
    """Return `token`. `AuthenticationError`, which calls it `name`, if it is too short to be one.

    The length is all that can be checked: whether it was drawn at random, nobody can see.
    """
    size = len(token.encode())
    if size < LEAST_BYTES:
        raise AuthenticationError(
            f"{name} has {size} bytes, and a token has {LEAST_BYTES} (128 bits) at least: who can "
            f"call a rank can try short ones one after the other. Make one with {MAKE_ONE}"
        )
    return token


def _read(path: str) -> str:
    """The text in a file that is fit for a secret."""
    try:
        # Not to wait for a writer, if it is a pipe; asked about the open file, not the name.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AuthenticationError(
            f"the token file {path} (PHALANX_TOKEN_FILE) cannot be read: {error.strerror}"
        ) from None
    try:
        problem = _problem(os.fstat(descriptor))
        if problem:
            raise AuthenticationError(
                f"the token file {path} {problem}; it has to be a file that only you can read: "
                f"chmod 600 {path}"
            )
        content = os.read(descriptor, MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MOST_BYTES:
        raise AuthenticationError(f"the token file {path} is longer than {MOST_BYTES} bytes")
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise AuthenticationError(
            f"the token file {path} is not text: a token is; make one with {MAKE_ONE}"
        ) from None


def _problem(status: os.stat_result) -> str:
    """Why a file is not fit for a secret, or ""."""
    if not stat.S_ISREG(status.st_mode):
        return "is no ordinary file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, and this process is user {os.geteuid()}'s"
    mode = stat.S_IMODE(status.st_mode)
    return f"is open to others (mode {mode:04o})" if mode & 0o077 else ""


# ------------------------------------------------------------------------------
# The sockets that listen at an address, and the ways to reach one.

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
