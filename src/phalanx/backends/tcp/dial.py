"""A call to a peer: again and again, until it is there and lets this rank in.

the peer does not answer the call      call again: it has not started (patient), or its queue
                                       is full of strangers
it refuses the connection              patient: call again. Else it was there, and is gone
it hangs up during the handshake       call again: it had to make room, or this rank was slow
it turns this rank away, with reason   that is final
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.backends.tcp.unproved import Unproved
from phalanx.wire.handshake import DialerHandshake, Refused

if TYPE_CHECKING:
    from phalanx.backends.tcp.mesh import Mesh

FIRST_RETRY, LAST_RETRY = 0.02, 0.25  # seconds between attempts to reach a peer
FIRST_WAIT, LAST_WAIT = 0.5, 8.0  # seconds for a connection: the kernel tries again too seldom

# Neither says that nobody is there: this host is short of something, or the peer hung up at once.
_MAY_PASS = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EADDRNOTAVAIL,
        errno.ECONNRESET,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)
_IDLE, _CALLING, _TALKING = range(3)

Address = tuple[int, tuple[object, ...]]  # family, socket address


class Dial(Unproved):
    """A call to `peer`. `patient`: it may not have started yet, so a refusal means nothing.

    `failed` is told, once, if there is no hope; `drop()` ends it. `trouble` is what the last
    attempt met. All methods are called with the engine's lock held; none blocks.
    """

    __slots__ = (
        "_addresses",
        "_attempt",
        "_failed",
        "_over",
        "_patient",
        "_refusals",
        "_retry",
        "_stage",
        "_wait",
        "peer",
        "trouble",
    )

    def __init__(
        self,
        mesh: Mesh,
        peer: int,
        addresses: list[Address],
        failed: Callable[[Refused], None],
        *,
        patient: bool,
    ) -> None:
        self.mesh = mesh
        self.peer = peer
        self.trouble = "no answer yet"
        self._addresses = addresses
        self._failed = failed
        self._patient = patient
        self._attempt = 0
        self._refusals = 0  # connections refused, one after the other
        self._retry = FIRST_RETRY
        self._stage = _IDLE
        self._wait = FIRST_WAIT
        self._over = False
        self._connect()

    @property
    def refused(self) -> bool:
        """Whether the last attempt found nobody listening."""
        return self._refusals > 0

    def drop(self) -> None:
        """Hang up, and do not call again."""
        self._over = True
        self._leave_connection()

    def _connect(self) -> None:
        family, address = self._addresses[self._attempt % len(self._addresses)]
        try:
            super().__init__(self.mesh, socket.socket(family, socket.SOCK_STREAM))
        except OSError as error:
            self._connection_failed(error.errno or 0)
            return
        self._stage = _CALLING
        self.handshake = DialerHandshake(self.mesh.identity, self.mesh.token, self.peer)
        code = self.sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._connection_failed(code)
            return
        self.mesh.reactor.watch(self.sock, self._on_connected, read=False, write=True)
        sock = self.sock
        self.mesh.reactor.call_later(self._wait, lambda: self._check_connected(sock))

    def _check_connected(self, sock: socket.socket) -> None:
        if self._stage == _CALLING and self.sock is sock:
            self._wait = min(2 * self._wait, LAST_WAIT)
            self._try_again("calls are not answered")

    def _on_connected(self, readable: bool, writable: bool) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if not code and self.sock.getsockname() == self.sock.getpeername():
                # Calling a free local port, the kernel may pick that very port as ours.
                code = errno.ECONNREFUSED
        except OSError:
            code = errno.ECONNRESET
        if code:
            self._connection_failed(code)
            return
        handshake = self.handshake
        assert isinstance(handshake, DialerHandshake)
        self._stage = _TALKING
        self._refusals = 0
        self.trouble = "it accepts connections but does not answer"
        self.mesh.reactor.watch(self.sock, self._on_ready)
        try:
            self.send(handshake.start())
        except Refused as refusal:
            self._try_again(refusal.reason)

    def _on_ready(self, readable: bool, writable: bool) -> None:
        handshake = self.handshake
        try:
            data = self.read(handshake.room)
            if data is not None:
                self.send(handshake.receive(data))
        except Refused as refusal:
            self.say_farewell()
            if refusal.final:
                self._give_up(refusal)
            else:
                self._try_again(refusal.reason)
            return
        if handshake.complete:
            self._over = True
            self._stage = _IDLE  # the socket is the link's now
            self.open()

    def _connection_failed(self, code: int) -> None:
        reason = os.strerror(code)
        if code not in _MAY_PASS:
            self._refusals += 1
            if not self._patient and self._refusals >= len(self._addresses):
                self._give_up(Refused(reason, peer=self.peer, final=False))
                return
        self._try_again(reason)

    def _try_again(self, reason: str) -> None:
        self.trouble = reason
        self._leave_connection()
        self._attempt += 1
        self.mesh.reactor.call_later(self._retry, self._call_again)
        self._retry = min(2 * self._retry, LAST_RETRY)

    def _call_again(self) -> None:
        if not self._over:
            self._connect()

    def _give_up(self, refusal: Refused) -> None:
        self.drop()
        self._failed(refusal)

    def _leave_connection(self) -> None:
        if self._stage != _IDLE:
            self._stage = _IDLE
            self.hang_up()
