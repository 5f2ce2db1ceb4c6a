"""A connection in its handshake, on either side: what the door and a call have in common."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.wire.handshake import Handshake, Refused

if TYPE_CHECKING:
    from phalanx.backends.tcp.mesh import Mesh

log = logging.getLogger("phalanx")

HUNG_UP = "the connection was closed during the handshake"


# What a short outage swallowed is sent again within a second of its end (Linux 6.15, uapi tcp.h).
TCP_RTO_MAX_MS = 44
LONGEST_RETRANSMIT = 1000  # milliseconds, the least that the kernel takes


class Unproved:
    """A non-blocking socket, and the handshake that goes over it."""

    __slots__ = ("handshake", "mesh", "sock")

    handshake: Handshake

    def __init__(self, mesh: Mesh, sock: socket.socket) -> None:
        self.mesh = mesh
        self.sock = sock
        sock.setblocking(False)

    def read(self, room: int) -> bytes | None:
        """What came, `room` bytes at most; None: nothing yet. Raises `Refused` at its end."""
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
        """Say something. Raises `Refused` if the connection does not take it whole."""
        # A handshake is a few hundred bytes: an empty socket buffer takes them.
        try:
            if data and self.sock.send(data) != len(data):
                raise Refused("the connection does not take the handshake", final=False)
        except OSError as error:
            log.debug("a connection broke during the handshake: %s", error)
            raise Refused(HUNG_UP, final=False) from None

    def say_farewell(self) -> None:
        """Tell the other side why it is turned away, if it can be told."""
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
        """The peer has proved itself: the connection is a link now."""
        with suppress(OSError):  # if it has broken already, the link will see
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # an older kernel
            self.sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_RETRANSMIT)
        peer = self.handshake.peer
        assert peer is not None
        self.mesh.link_opened(peer, self.sock, self.handshake.surplus)
