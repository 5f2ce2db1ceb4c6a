"""The door: how connections come to be, from either side, before they count.

A connection is a stranger's until the handshake is complete. Of two ranks the higher calls.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.wire.address import is_loopback
from phalanx.wire.handshake import AcceptorHandshake, DialerHandshake, Handshake, Refused

if TYPE_CHECKING:
    from phalanx.backends.tcp.mesh import Mesh

log = logging.getLogger("phalanx")

HUNG_UP = "the connection was closed during the handshake"
PATIENCE = 2.0  # seconds that a caller may be silent before it has proved itself
FIRST_RETRY, LAST_RETRY = 0.02, 1.0  # seconds between attempts to reach a peer that starts

Address = tuple[int, tuple[object, ...]]  # family, socket address


class Door:
    """A listener: every caller becomes a `Knock`."""

    def __init__(self, mesh: Mesh, listener: socket.socket) -> None:
        self.mesh = mesh
        self.listener = listener
        self.knocks: set[Knock] = set()
        listener.setblocking(False)
        mesh.reactor.watch(listener, self._on_ready)

    def _on_ready(self, readable: bool, writable: bool) -> None:
        try:
            while True:
                sock, address = self.listener.accept()
                host = str(address[0])
                if self.mesh.loopback_only and not is_loopback(host):
                    sock.close()
                    self.mesh.turned_away(
                        f"{host}: without a token (PHALANX_TOKEN) only this host is let in"
                    )
                else:
                    self.knocks.add(Knock(self, sock, host))
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("rank %d: accept failed: %s", self.mesh.rank, error)

    def close(self) -> None:
        """Listen no more, and send away whoever has not finished."""
        self.mesh.reactor.forget(self.listener)
        self.listener.close()
        for knock in list(self.knocks):
            knock.drop()


class _Unproved:
    """One connection in its handshake, on either side."""

    handshake: Handshake

    def __init__(self, mesh: Mesh, sock: socket.socket) -> None:
        self.mesh = mesh
        self.sock = sock
        sock.setblocking(False)

    def _receive(self) -> bool:
        """Take what came and answer. True when the handshake is complete; may raise `Refused`."""
        try:
            data = self.sock.recv(4096)
        except BlockingIOError:
            return False
        except OSError as error:
            log.debug("a connection broke during the handshake: %s", error)
            raise Refused(HUNG_UP, final=False) from None
        if not data:
            raise Refused(HUNG_UP, final=False)
        self._send(self.handshake.receive(data))
        return self.handshake.complete

    def _send(self, data: bytes) -> None:
        # A handshake is a few hundred bytes: an empty socket buffer takes them whole.
        try:
            if data and self.sock.send(data) != len(data):
                raise Refused("the connection does not take the handshake", final=False)
        except OSError as error:
            log.debug("a connection broke during the handshake: %s", error)
            raise Refused(HUNG_UP, final=False) from None

    def _farewell(self) -> None:
        if self.handshake.farewell:
            try:
                self.sock.send(self.handshake.farewell)
            except OSError:
                log.debug("a refused peer had gone already")

    def _open(self) -> None:
        """The peer has proved itself: the connection is a link now."""
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = self.handshake.peer
        assert peer is not None
        self.mesh.link_opened(peer, self.sock, self.handshake.surplus)


class Knock(_Unproved):
    """A caller at the door."""

    def __init__(self, door: Door, sock: socket.socket, host: str) -> None:
        super().__init__(door.mesh, sock)
        self.door = door
        self.host = host
        self.handshake = AcceptorHandshake(self.mesh.identity, self.mesh.token, self.mesh.admit)
        self._heard = False
        self.mesh.reactor.watch(sock, self._on_ready)
        self.mesh.reactor.call_later(PATIENCE, self._check_patience)

    def _on_ready(self, readable: bool, writable: bool) -> None:
        self._heard = True
        try:
            if not self._receive():
                return
        except Refused as refusal:
            self._farewell()
            self._turn_away(refusal.reason)
            return
        self.door.knocks.discard(self)
        self._open()

    def _check_patience(self) -> None:
        if self not in self.door.knocks:
            return
        if self._heard:  # since the last check: this rank may have been away itself
            self._heard = False
            self.mesh.reactor.call_later(PATIENCE, self._check_patience)
        else:
            self._turn_away(f"silent for {PATIENCE:g} s")

    def _turn_away(self, reason: str) -> None:
        peer = self.handshake.peer
        if reason != HUNG_UP:  # which says nothing, and port scanners do it all the time
            who = f"{self.host}, as rank {peer}" if peer is not None else self.host
            self.mesh.turned_away(f"{who}: {reason}")
        self.drop()

    def drop(self) -> None:
        """Hang up."""
        self.door.knocks.discard(self)
        self.mesh.reactor.forget(self.sock)
        self.sock.close()


class Dial(_Unproved):
    """A call to a peer. `patient`: it may not have started yet, so try again and again."""

    def __init__(
        self,
        mesh: Mesh,
        peer: int,
        addresses: list[Address],
        failed: Callable[[Refused], None],
        *,
        patient: bool,
    ) -> None:
        self.peer = peer
        self.trouble = "no answer yet"
        self._addresses = addresses
        self._failed = failed
        self._patient = patient
        self._attempt = 0
        self._retry = FIRST_RETRY
        self._over = False
        self._connect(mesh)

    def drop(self) -> None:
        """Hang up, and do not call again."""
        self._over = True
        self.mesh.reactor.forget(self.sock)
        self.sock.close()

    def _connect(self, mesh: Mesh) -> None:
        family, address = self._addresses[self._attempt % len(self._addresses)]
        super().__init__(mesh, socket.socket(family, socket.SOCK_STREAM))
        self.handshake = DialerHandshake(mesh.identity, mesh.token, self.peer)
        code = self.sock.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            mesh.reactor.watch(self.sock, self._on_connected, read=False, write=True)
        else:
            self._try_again(code)

    def _on_connected(self, readable: bool, writable: bool) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._try_again(code)
            return
        if self.sock.getsockname() == self.sock.getpeername():
            # Calling a free local port, the kernel may pick that very port as ours.
            self._try_again(errno.ECONNREFUSED)
            return
        handshake = self.handshake
        assert isinstance(handshake, DialerHandshake)
        self.trouble = "it accepts connections but does not answer"
        self.mesh.reactor.watch(self.sock, self._on_ready)
        try:
            self._send(handshake.start())
        except Refused as refusal:
            self._try_again(0, refusal)

    def _on_ready(self, readable: bool, writable: bool) -> None:
        try:
            if not self._receive():
                return
        except Refused as refusal:
            self._farewell()
            if refusal.final:
                self.drop()
                self._failed(refusal)
            else:
                self._try_again(0, refusal)
            return
        self._over = True
        self._open()

    def _try_again(self, code: int, refusal: Refused | None = None) -> None:
        refusal = refusal or Refused(os.strerror(code), peer=self.peer, final=False)
        self.trouble = refusal.reason
        self.mesh.reactor.forget(self.sock)
        self.sock.close()
        self._attempt += 1
        if not self._patient and self._attempt >= len(self._addresses):
            self._over = True
            self._failed(refusal)
            return
        self.mesh.reactor.call_later(self._retry, self._call_again)
        self._retry = min(2 * self._retry, LAST_RETRY)

    def _call_again(self) -> None:
        if not self._over:
            self._connect(self.mesh)
