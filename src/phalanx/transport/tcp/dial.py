"""Dialing a peer, again and again until it accepts this rank; and messages that wait for it.

Before that, `await_name` waits until the name of rank 0's host is known.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING

from phalanx.core.posted import PostedSend
from phalanx.errors import BackendUnavailableError
from phalanx.transport.tcp.addresses import resolve
from phalanx.transport.tcp.admission import OUT_OF, check_user, receive, send
from phalanx.transport.tcp.loop import READ, WRITE
from phalanx.wire.control import Endpoint
from phalanx.wire.frame import Channel, Kind, pack_header
from phalanx.wire.handshake import DialerHandshake, Refused

if TYPE_CHECKING:
    from phalanx.transport.tcp.connection import Connection
    from phalanx.transport.tcp.flooding import Flooding
    from phalanx.transport.tcp.mesh import Mesh

log = logging.getLogger("phalanx")

FIRST_RETRY, LAST_RETRY = 0.02, 0.25  # seconds between attempts to reach a peer
FIRST_WAIT, LAST_WAIT = 0.5, 8.0  # seconds for a connection: the kernel tries again too seldom

# Neither means that nobody listens: this host lacks a resource, or the peer hung up at once.
_MAY_PASS = OUT_OF | {
    errno.EAGAIN,
    errno.EADDRNOTAVAIL,
    errno.ECONNRESET,
    errno.EPIPE,
    errno.ETIMEDOUT,
}


class Dial:
    """A call to `peer`. `patient`: it may not have started yet, so a refused connection means
    nothing.

        the peer does not answer the call      call again: it has not started (patient), or its
                                               queue is full of other callers
        it refuses the connection              patient: call again. Else it was there, and is gone
        it hangs up during the handshake,      call again: it had to make room, or this rank was
        or does not begin it                   slow, or its queue is full of other callers
        it turns this rank away, with reason   that is final

    trouble    the obstacle of the last attempt
    lacks      whether that was a resource which this host lacks
    answered   whether the peer's host has taken a call
    refusal    the reason, if there is no hope; then `refused` is called, in a later turn of the
               reactor. With `refused`, a resource that is lacking is a refusal, too
    refusals   connections refused, one after the other
    sock       of the call that is under way

    `drop()` ends it. All methods are called with the engine's lock held; none blocks.
    """

    def __init__(
        self,
        mesh: Mesh,
        peer: int,
        addresses: list[tuple[int, tuple[object, ...]]],  # family, socket address
        *,
        patient: bool,
        name: str = "",
        refused: Callable[[Refused], None] | None = None,
    ) -> None:
        self.mesh = mesh
        self.peer = peer
        self.name = name  # for errors
        self.trouble = "no answer yet"
        self.refusal: Refused | None = None
        self.refusals = self.attempts = 0
        self.answered = self.lacks = False
        self._refused = refused
        self._handshake: DialerHandshake | None = None
        self._addresses = addresses
        self._patient = patient
        self.sock: socket.socket | None = None
        self._dropped = False
        self._waits = 0
        self._wait = FIRST_WAIT
        self._course = self._call()
        self._go_on(None)

    def drop(self) -> None:
        """Hang up, and do not call again."""
        self._dropped = True
        self._hang_up()

    def take_leave(self) -> None:
        """`drop` as a rank that closes in good order: the peer may have accepted it already."""
        if self.sock is not None and self._handshake is not None and self._handshake.proved:
            with suppress(OSError):
                self.sock.send(pack_header(Channel(0, Kind.LEAVE, 0)))
        self.drop()

    def _hang_up(self) -> None:
        if self.sock is not None:
            self.mesh.reactor.forget(self.sock)
            self.sock.close()
            self.sock = self._handshake = None

    def _go_on(self, ready: bool | None) -> None:
        """Go on until the call waits: for an event of its socket, or for some time."""
        if self._dropped:
            return
        self._waits += 1
        reactor = self.mesh.reactor
        try:
            events, seconds = self._course.send(ready)
        except StopIteration:
            return
        if self.sock is not None:
            reactor.watch(self.sock, lambda *_: self._go_on(True), events)
        if seconds < math.inf:
            reactor.call_later(seconds, partial(self._waited, self._waits))

    def _waited(self, number: int) -> None:
        if number == self._waits:  # it still does
            self._go_on(False)

    def _call(self) -> Generator[tuple[int, float], bool | None, None]:
        """Yield an event and the longest wait for it; is sent whether the event has come."""
        mesh, retry = self.mesh, FIRST_RETRY
        while True:
            self.lacks = False
            try:
                sock, handshake = yield from self._attempt()
            except OSError as error:
                self.trouble = os.strerror(error.errno or 0)
                self.refusals += error.errno not in _MAY_PASS
                self.lacks = error.errno in OUT_OF
                gone = not self._patient and self.refusals >= len(self._addresses)
                if gone or (self.lacks and self._refused is not None):
                    self.refusal = Refused(self.trouble, final=False)
            except Refused as refusal:
                self.trouble = refusal.reason
                if self.sock is not None and self._handshake is not None:
                    with suppress(OSError):  # it may have gone already
                        self.sock.send(self._handshake.farewell)
                if refusal.final:
                    self.refusal = refusal
            else:
                self.sock = None  # it is the connection's now
                mesh.link_opened(self.peer, sock, handshake.surplus)
                return
            self._hang_up()
            if self.refusal is not None:
                if self._refused is not None:
                    mesh.reactor.call_later(0.0, partial(self._refused, self.refusal))
                return
            self.attempts += 1
            yield 0, retry
            retry = min(2 * retry, LAST_RETRY)

    def _attempt(
        self,
    ) -> Generator[tuple[int, float], bool | None, tuple[socket.socket, DialerHandshake]]:
        """Call once; return the socket when the peer has let this rank in. Yields as `_call`."""
        mesh = self.mesh
        family, address = self._addresses[self.attempts % len(self._addresses)]
        self.sock = sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect(address)
        if not (yield WRITE, self._wait):
            raise self._unanswered("calls are not answered")
        _check_connected(sock)
        self.refusals = 0
        self.answered = True
        self.trouble = "it accepts connections but does not answer; is it another program?"
        handshake = DialerHandshake(mesh.identity, mesh.token, self.peer, mesh.tls.offer(sock))
        self._handshake = handshake
        send(sock, handshake.start())
        while not handshake.complete:
            data = receive(sock, handshake.room)
            if data is not None:
                reply = handshake.receive(data)
                check_user(sock, handshake)
                send(sock, reply)
                if handshake.begins_tls:
                    mesh.reactor.forget(sock)
                    self.sock = sock = mesh.tls.wrap(sock, handshake)
            # A call in a queue full of other callers may be lost without a word. One that has
            # proved itself is not given up: the peer may take it to be open.
            elif not (yield READ, math.inf if handshake.proved else self._wait):
                raise self._unanswered(self.trouble)
        return sock, handshake

    def _unanswered(self, trouble: str) -> Refused:
        self._wait = min(2 * self._wait, LAST_WAIT)
        return Refused(trouble, final=False)


def _check_connected(sock: socket.socket) -> None:
    """Raise OSError if a call has failed."""
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    try:
        if not code and sock.getsockname() == sock.getpeername():
            # Calling a free local port, the kernel may pick that very port as ours.
            code = errno.ECONNREFUSED
    except OSError:
        code = errno.ECONNRESET
    if code:
        raise OSError(code, os.strerror(code))


def await_name(endpoint: Endpoint, seconds: float) -> None:
    """Block until the host's name can be resolved: that of a pod may be known some time later.

    `BackendUnavailableError` when it still cannot be after so many seconds.
    """
    deadline = monotonic() + seconds
    told = False
    while True:
        try:
            resolve(endpoint)
        except BackendUnavailableError as error:
            if monotonic() + LAST_RETRY > deadline:
                raise BackendUnavailableError(f"{error}; it was tried for {seconds:g} s") from None
            if not told:
                log.warning("%s; it is tried for %g s", error, seconds)
            told = True
            sleep(LAST_RETRY)
        else:
            return


# ------------------------------------------------------------------------------
# In a wide mesh a peer is called when something is to be sent to it.


class LazyConnection:
    """A connection that is being made; messages to the peer wait here in their order.

    patience   seconds within which the peer's host has to take the call

    All methods are called with the engine's lock held.
    """

    def __init__(self, mesh: Mesh, wide: Flooding, peer: int, patience: float) -> None:
        self.mesh = mesh
        self.wide = wide
        self.peer = peer
        self._sends: deque[PostedSend] = deque()
        self._control: deque[tuple[Kind, bytes, int, int]] = deque()
        endpoint = Endpoint(mesh.addresses[peer].host, mesh.addresses[peer].port)
        self.dial = Dial(
            mesh,
            peer,
            resolve(endpoint, numeric=True),
            patient=False,
            name=f"rank {peer} at {endpoint}",
            refused=self._refused,
        )
        if patience < math.inf:
            mesh.reactor.call_later(patience, self._look)

    def send(self, send: PostedSend) -> None:
        """Send a message once there is a connection."""
        self._sends.append(send)

    def send_control(
        self, kind: Kind, payload: bytes = b"", *, group: int = 0, number: int = 0
    ) -> None:
        """Send a control frame once there is a connection."""
        self._control.append((kind, payload, group, number))

    def cancel(self, send: PostedSend) -> None:
        with suppress(ValueError):
            self._sends.remove(send)

    def opened(self, connection: Connection) -> None:
        """Send all that waits: there is a connection."""
        self.dial.drop()
        for kind, payload, group, number in self._control:
            connection.send_control(kind, payload, group=group, number=number)
        for message in self._sends:
            connection.send(message)

    def _refused(self, refusal: Refused) -> None:
        """Take the refusal: there is no hope for this call."""
        mesh, peer = self.mesh, self.peer
        if self.wide.calls.get(peer) is not self:
            return
        if self.dial.lacks:
            self.wide.drop_call(peer)
            for send in list(self._sends):
                send.work.group.work_failed(send.work, self._lacking(send))
        elif refusal.final:
            by = "turned this rank away" if refusal.by_peer else "was turned away"
            mesh.rank_lost(peer, f"{self.dial.name} {by}: {refusal.reason}")
        else:
            if self._sends:  # a firewall may do this, too
                log.warning("rank %d: %s refuses connections", mesh.rank, self.dial.name)
            self.wide.refused(peer)

    def _look(self) -> None:
        """Check, after a heartbeat's time, that the peer's host has taken the call."""
        if self.wide.calls.get(self.peer) is self and not self.dial.answered:
            reason = f"{self.dial.name} cannot be reached: {self.dial.trouble}"
            self.mesh.rank_lost(self.peer, reason)

    def _lacking(self, send: PostedSend) -> BackendUnavailableError:
        work = send.work
        group = work.group
        return BackendUnavailableError(
            f"rank {group.name}: {work.describe()}: no connection to rank "
            f"{group.name_of_global(self.peer)} can be opened: {self.dial.trouble}; a rank has one "
            "to each rank that it has sent something to, so this process may need more (ulimit -n)",
            rank=group.rank,
            peer=group.to_local.get(self.peer),
            op=work.name,
            sequence=work.sequence,
        )
