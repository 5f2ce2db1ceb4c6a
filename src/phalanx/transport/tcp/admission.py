"""The acceptor: incoming connections, until they are authenticated.

An unauthenticated connection, one whose handshake is not complete, may cost

    memory       1 KiB in this process: its socket, its place in the tables, one message of the
                 handshake (not the kernel's own buffers, which the kernel bounds)
    time         2 s of this rank's attention, however much it sends
    a place      of 128, and one for each rank; the oldest of those that have said the least gives
                 way to the next caller, also when there is no file descriptor left
    a log line   of ten in full, then only a count; callers that claim to be a rank are counted
                 apart, so that a port scanner cannot hide the rank with the wrong token

No name is looked up. A rank of the job that has to give way connects again (`Dial`).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from phalanx import files
from phalanx.errors import AuthenticationError
from phalanx.transport.tcp.addresses import BACKLOG, stranger, uid_of_peer
from phalanx.transport.tcp.loop import Reactor
from phalanx.wire.control import is_loopback
from phalanx.wire.handshake import FIRST, AcceptorHandshake, Handshake, Identity, Refused

if TYPE_CHECKING:
    from phalanx.transport.tcp.tls import Tls

log = logging.getLogger("phalanx")

PATIENCE = 2.0  # seconds within which a caller has to be authenticated,
TICKS = 20  # checked so many times
PLACES = 128  # callers in their handshake at a time, beside one for each rank
CALLS_AT_A_TIME = 32  # fewer than the places, so that a caller is read before it gives way
REST = 0.1  # seconds without accepting, when there are no resources for it
TOLD_IN_FULL = 10  # log lines of each kind; then one for the 10th, 100th, 1000th ...
HUNG_UP = "the connection was closed during the handshake"

OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})  # a host lacks it
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


def receive(sock: socket.socket, room: int) -> bytes | None:
    """Words of a handshake, `room` bytes at most; None: nothing yet. `Refused` at their end."""
    try:
        data = sock.recv(room)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno == errno.EBADMSG:  # TLS does not come about
            raise Refused(str(error.strerror)) from None
        log.debug("a connection broke during the handshake: %s", error)
        data = b""
    if not data:
        raise Refused(HUNG_UP, final=False)
    return data


def send(sock: socket.socket, data: bytes) -> None:
    """Send words of a handshake. Raises `Refused` if the socket does not take them all."""
    # They are a few hundred bytes: an empty socket buffer takes them.
    try:
        if data and sock.send(data) != len(data):
            raise Refused("the connection does not take the handshake", final=False)
    except OSError as error:
        log.debug("a connection broke during the handshake: %s", error)
        raise Refused(HUNG_UP, final=False) from None


def check_user(sock: socket.socket, handshake: Handshake) -> None:
    """Raise `Refused` if without a token another user's process has answered a call.

    Not before it has answered: until it accepts the call, nobody holds its socket.
    """
    if not (handshake.has_token or handshake.complete) and (reason := stranger(sock)):
        raise Refused(reason, final=uid_of_peer(sock) is not None)


def speak(
    sock: socket.socket, handshake: Handshake, first: bytes, seconds: float, tls: Tls
) -> socket.socket:
    """Carry out a whole handshake that begins with `first`; blocks for so many seconds at most.

    Return the socket to go on with, which has that timeout; `sock` is not to be used any more.
    Raises `Refused`, or OSError (TimeoutError when the other side is silent, EBADMSG from TLS).
    """
    deadline, words = monotonic() + seconds, first
    try:
        while True:
            sock.settimeout(max(deadline - monotonic(), 0.001))
            sock.sendall(words)
            if handshake.begins_tls:
                sock = tls.wrap(sock, handshake)
            if handshake.complete:
                sock.settimeout(seconds)
                return sock
            data = sock.recv(handshake.room)
            if not data:
                raise Refused(HUNG_UP, final=False)
            words = handshake.receive(data)
            check_user(sock, handshake)
    except BaseException as error:
        with sock, suppress(OSError):  # it may have gone already
            if isinstance(error, Refused):
                sock.sendall(handshake.farewell)
        raise


class Door(Protocol):
    """The place behind an `Acceptor`: a rank's mesh, or a server of the launcher.

    label      its name for the log: "rank 3"
    callers    number of callers that are expected
    """

    label: str
    callers: int
    reactor: Reactor
    identity: Identity
    token: bytes
    tls: Tls

    @abstractmethod
    def admit(self, peer: int) -> str | None:
        """Return why a caller that has proved itself is turned away all the same, or None.

        Raises `Refused` to hang up without a word.
        """

    @abstractmethod
    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        """Take a caller that is in. `surplus` came behind its handshake."""


class Acceptor:
    """A listener: every caller becomes a `PendingConnection`, and in the end the door's.

    tick             seconds between checks whether callers have been there for too long
    now              ticks that this rank has seen; none while it computes: callers then have to
                     wait
    last_rejection   the caller that was turned away last, and the reason; for errors

    All methods are called with the engine's lock held; none blocks.
    """

    def __init__(
        self, door: Door, listener: socket.socket, *, tick: float = PATIENCE / TICKS
    ) -> None:
        self.door = door
        self.listener = listener
        self.tick = tick
        self.pending: dict[PendingConnection, None] = {}  # in the order in which they came
        self.places = PLACES + door.callers
        self.now = 0
        self.last_rejection = ""
        self.admit = door.admit  # one bound method for all pending connections
        self._rejected = [0, 0]  # that have claimed nothing, that have claimed to be a rank
        self._last_rank = ""  # of the latter the last one
        self._ticking = False
        listener.setblocking(False)
        with suppress(OSError):
            listener.listen(BACKLOG)  # unauthenticated callers must not fill the queue
        self._listen()

    def close(self) -> None:
        """Stop listening, and drop the connections that are not authenticated."""
        self.door.reactor.forget(self.listener)
        self.listener.close()
        self._drop_all()
        if max(self._rejected) > TOLD_IN_FULL:
            log.warning(
                "%s turned away %d unauthenticated callers and %d that said which rank they are "
                "while its job formed",
                self.door.label,
                *self._rejected,
            )

    @property
    def closed(self) -> bool:
        """True if it has stopped listening."""
        return self.listener.fileno() < 0

    def begin_again(self, error: Exception) -> None:
        """Drop the connections that are not authenticated, and listen: an error came inside."""
        self._drop_all()
        self._rest(error)

    def _drop_all(self) -> None:
        for pending in list(self.pending):
            self.drop(pending)

    def drop(self, pending: PendingConnection) -> None:
        self.pending.pop(pending, None)
        self.door.reactor.forget(pending.sock)
        pending.sock.close()

    def begin_tls(self, pending: PendingConnection) -> None:
        """Go on within TLS: the caller has proved itself, and has as much time again."""
        self.door.reactor.forget(pending.sock)
        try:
            pending.sock = self.door.tls.wrap(pending.sock, pending.handshake)
        except OSError:
            raise Refused(HUNG_UP, final=False) from None
        self.door.reactor.watch(pending.sock, pending.hear)
        pending.auth_state, pending.born = 3, self.now
        self.pending[pending] = self.pending.pop(pending)  # in the order of `born`

    def turn_away(self, pending: PendingConnection, reason: str) -> None:
        """Close a pending connection, and log the reason."""
        rank = pending.handshake.peer if pending.auth_state else None
        who = pending.host if rank is None else f"{pending.host}, as rank {rank}"
        self._reject(f"{who}: {reason}", is_rank=rank is not None)
        self.drop(pending)

    def _reject(self, what: str, *, is_rank: bool = False) -> None:
        """Count and log a caller that was refused, and keep the reason for a timeout's error."""
        self._rejected[is_rank] += 1
        number = self._rejected[is_rank]
        self.last_rejection = what
        if is_rank:
            self._last_rank = what
        elif self._last_rank:
            self.last_rejection += f"; before that {self._last_rank}"
        if number <= TOLD_IN_FULL:
            log.warning("%s turned away %s", self.door.label, what)
        elif str(number).strip("0") == "1":  # a power of ten
            kind = "callers that said which rank they are" if is_rank else "unauthenticated callers"
            text = "%s turned away %d %s so far, the last of them %s"
            log.warning(text, self.door.label, number, kind, what)

    def _on_ready(self, readable: bool, writable: bool) -> None:
        for _ in range(CALLS_AT_A_TIME):
            try:
                sock, address = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OF_THE_CALLER:
                    continue
                if error.errno in OUT_OF and self.pending:
                    # A quarter of them, not one: this rank needs some for its own calls.
                    self.places = 3 * len(self.pending) // 4
                    self._make_room(self.places)
                    continue
                self._rest(error)
                return
            host = str(address[0])
            reason = "" if self.door.token else _outsider(sock, host)
            if reason:
                sock.close()
                self._reject(f"{host}: {reason}")
                continue
            self._make_room(max(self.places - 1, 0))
            pending = PendingConnection(self, sock, host)
            self.pending[pending] = None
            pending.hear()  # now, so that it does not count as silent when the next one comes
            if not self._ticking:
                self._ticking = True
                self.door.reactor.call_later(self.tick, self._tick)

    def _make_room(self, most: int) -> None:
        """Close pending connections until there are `most`."""
        while len(self.pending) > most:
            silent = (pending for pending in self.pending if not pending.auth_state)
            first = next(silent, None) or min(self.pending, key=lambda each: each.auth_state)
            self.turn_away(first, "had to give way to other callers before it had proved itself")

    def _tick(self) -> None:
        # Callers' words were read before: sockets come before timers in every turn. And
        # after a long absence this rank counts one tick, not many.
        self.now += 1
        self._ticking = False
        for pending in list(self.pending):
            if pending.born + TICKS > self.now:
                break
            did = "did not prove itself" if pending.auth_state else "was silent"
            self.turn_away(pending, f"{did} for {PATIENCE:g} s")
        self._ticking = bool(self.pending)
        if self._ticking:
            self.door.reactor.call_later(self.tick, self._tick)

    def _rest(self, error: Exception) -> None:
        """Try later, do not spin: no connection can be accepted now, and none can be dropped."""
        reason = getattr(error, "strerror", None) or repr(error)
        if getattr(error, "errno", 0) in OUT_OF:
            reason += "; this process may need more (ulimit -n)"
        self._reject(f"a caller, whom it could not accept: {reason}")
        self.door.reactor.forget(self.listener)
        self.door.reactor.call_later(REST, self._listen)

    def _listen(self) -> None:
        if not self.closed:
            self.door.reactor.watch(self.listener, self._on_ready)


def _outsider(sock: socket.socket, host: str) -> str:
    """Return why a caller is not let in without a token, or ""."""
    if not is_loopback(host):
        return "without a token (PHALANX_TOKEN) only this host is let in"
    return stranger(sock)


class PendingConnection:
    """A caller.

    auth_state   0 has sent nothing, 1 has sent something, 2 was challenged, 3 has proved itself,
                 and TLS begins
    """

    __slots__ = ("acceptor", "auth_state", "born", "handshake", "host", "sock")

    handshake: AcceptorHandshake  # most silent callers stay silent: they cost none

    def __init__(self, acceptor: Acceptor, sock: socket.socket, host: str) -> None:
        self.acceptor = acceptor
        self.sock = sock
        self.host = host
        self.born = acceptor.now
        self.auth_state = 0
        sock.setblocking(False)
        acceptor.door.reactor.watch(sock, self.hear)

    def hear(self, readable: bool = True, writable: bool = False) -> None:
        """Read what the caller has sent, if anything, and answer (from the reactor)."""
        acceptor, door = self.acceptor, self.acceptor.door
        try:
            while not (self.auth_state and self.handshake.complete):
                data = receive(self.sock, self.handshake.room if self.auth_state else FIRST)
                if data is None:
                    return
                if not self.auth_state:
                    offer = door.tls.offer(self.sock)
                    self.handshake = AcceptorHandshake(
                        door.identity, door.token, acceptor.admit, offer
                    )
                    self.auth_state = 1
                send(self.sock, self.handshake.receive(data))
                if self.handshake.begins_tls:
                    acceptor.begin_tls(self)
                elif self.handshake.peer is not None:
                    self.auth_state = max(self.auth_state, 2)
        except Refused as refusal:
            if refusal.reason == HUNG_UP:  # no line in the log: port scanners do it all the time
                acceptor.drop(self)
                return
            with suppress(OSError):  # it may have gone already
                self.sock.send(self.handshake.farewell)
            acceptor.turn_away(self, refusal.reason)
            return
        del acceptor.pending[self]
        door.reactor.forget(self.sock)  # it is the door's, which may read it in a thread
        assert self.handshake.peer is not None
        door.link_opened(self.handshake.peer, self.sock, self.handshake.surplus)


# ------------------------------------------------------------------------------
# The job's token: the secret that all its ranks hold.
#
#     PHALANX_TOKEN        the token itself
#     PHALANX_TOKEN_FILE   a file that holds it, which only its owner may read (chmod 600)
#
# Never on a command line, which everybody on the host can read, and never in any message: errors
# here tell a token's length, at most.

LEAST_BYTES = 16  # 128 bits, if they are random
MOST_BYTES = 4096
MAKE_ONE = "phalanx token"


def find_token(environ: Mapping[str, str] = os.environ) -> str:
    """Return the token that the environment gives, or ""; PHALANX_TOKEN goes before the file.

    The file's content counts without white space at its ends. `AuthenticationError` when the file
    cannot be read, is readable for others than its owner, or belongs to somebody else, and when
    the token is shorter than 128 bits. A Secret that Kubernetes mounts for a user who is not root
    is a file of root's with mode 0440 and a group of this process's (`fsGroup`): that one is taken.
    """
    token = environ.get("PHALANX_TOKEN", "")
    if token:
        return check_token(token, "PHALANX_TOKEN")
    path = environ.get("PHALANX_TOKEN_FILE", "")
    if path:
        remedy = f"chmod 600 {path}"
        if "KUBERNETES_SERVICE_HOST" in environ:  # where a Secret cannot be changed
            remedy = "give the Secret's volume defaultMode: 0400, and the pod an fsGroup"
        token = read_own(path, "token", "PHALANX_TOKEN_FILE", remedy=remedy)
        return check_token(token, f"the token in {path} (PHALANX_TOKEN_FILE)")
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


def read_own(
    path: str, what: str, variable: str, *, remedy: str, most: int = MOST_BYTES, secret: bool = True
) -> str:
    """Return the text of a file that `variable` names, which nobody else may read if it is secret.

    `AuthenticationError` when it is not that, or longer than `most` bytes; `remedy` mends it.
    """
    name = f"the {what} file {path} ({variable})"
    try:
        with files.reading(path, most, follow=True) as descriptor:
            problem = _problem(os.fstat(descriptor)) if secret else ""
            text = os.read(descriptor, most).decode().strip()
    except OSError as error:
        also = f"; {remedy}" if error.errno == errno.EACCES else ""
        raise AuthenticationError(f"{name} cannot be read: {error.strerror}{also}") from None
    except UnicodeDecodeError:
        raise AuthenticationError(f"{name} is not text, as a {what} is: {remedy}") from None
    if problem:
        raise AuthenticationError(
            f"{name} {problem}; it has to be a file that only you can read: {remedy}"
        )
    return text


def _problem(status: os.stat_result) -> str:
    """Return why a file is not fit for a secret, or ""."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, and this process is user {os.geteuid()}'s"
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == 0 and mode == 0o440 and status.st_gid in (os.getegid(), *os.getgroups()):
        return ""
    return f"is open to others (mode {mode:04o})" if mode & 0o077 else ""
