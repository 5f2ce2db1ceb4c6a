"""The mesh: this rank's connections to all others.

All are made when the ranks meet, before the first message. So whoever dies is missed at once by
everyone, word of a failure reaches a rank whatever it is doing, and a message can be sent to a rank
that is busy elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from phalanx.core.engine import Engine
from phalanx.core.failure import Failure
from phalanx.transport.tcp.admission import Acceptor
from phalanx.transport.tcp.connection import Connection
from phalanx.wire.control import Answer, Ask, FailureNotice, decode
from phalanx.wire.frame import FrameError, Header, Kind
from phalanx.wire.handshake import Identity

if TYPE_CHECKING:
    from phalanx.transport.shm.domain import HostDomain
    from phalanx.transport.tcp.rendezvous import Rendezvous
log = logging.getLogger("phalanx")


class Mesh:
    """Knows who is connected, who has left, and who is let in.

    All methods are called with the engine's lock held.
    """

    def __init__(
        self,
        engine: Engine,
        reactor: Reactor,
        identity: Identity,
        token: bytes,
        *,
        loopback_only: bool,
    ) -> None:
        self.engine = engine
        self.reactor = reactor
        self.identity = identity
        self.token = token
        self.loopback_only = loopback_only
        self.acceptor: Acceptor | None = None
        self.connections: dict[int, Connection] = {}
        self.left: set[int] = set()  # peers that have closed in good order
        self.rendezvous: Rendezvous | None = None  # while the ranks are epoch
        self.last_rejection = ""
        self.host = ""  # what this rank's host counts as; "": what it is
        self.domain: HostDomain | None = None  # what this rank shows to others of its host

    @property
    def rank(self) -> int:
        """This rank."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.identity.world_size

    def control_came(self, connection: Connection, header: Header, payload: bytes) -> None:
        """A control frame came from a peer. Raises `FrameError` for one that makes no sense."""
        group, kind = header.channel.group, header.channel.kind
        if kind is Kind.FAILURE:
            notice = decode(payload, FailureNotice)
            # A library may not know whose fault it was: then the culprit is -1.
            if not (-1 <= notice.culprit < self.world_size > notice.reporter >= 0):
                raise FrameError(
                    f"word of a failure of rank {notice.culprit}, from rank {notice.reporter}: "
                    f"there are {self.world_size} ranks"
                )
            if self.rendezvous is not None:
                self.rendezvous.told(Failure.from_notice(notice))
            self.engine.on_control(connection.peer, group, notice)
        elif kind is Kind.LEAVE_GROUP:
            self.engine.on_control(connection.peer, group, None)
        elif kind is Kind.LEAVE:
            connection.left = True
            self.left.add(connection.peer)
            self.engine.peer_left(connection.peer)
        elif kind is Kind.ASK:
            self.engine.on_control(connection.peer, group, decode(payload, Ask))
        elif kind is Kind.ANSWER:
            self.engine.on_control(connection.peer, group, decode(payload, Answer))
        elif kind is Kind.HEARTBEAT:
            pass  # that it came is all that it says
        elif self.rendezvous is not None:
            self.rendezvous.control_came(connection, header, payload)
        else:
            raise FrameError(f"a {kind.name} frame after the rendezvous")

    # Connections that come to be ------------------------------------------------------------

    def open_acceptor(self, listener: socket.socket) -> None:
        """Let peers in there."""
        self.acceptor = Acceptor(self, listener)

    def admit(self, peer: int) -> str | None:
        """Why a peer that has proved itself is turned away all the same, or None."""
        if peer in self.connections or peer in self.left or peer in self.engine.lost:
            return f"rank {peer} is, or was, connected already: is a second copy of it running?"
        if peer < self.rank:
            return f"rank {self.rank} calls rank {peer}, not the other way round"
        return None

    def turned_away(self, what: str) -> None:
        """Someone was refused."""
        self.last_rejection = what
        log.warning("rank %d turned away %s", self.rank, what)

    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        """A peer has proved itself: messages can flow."""
        connection = Connection(self, peer, sock)
        self.connections[peer] = connection
        if self.rendezvous is not None:
            self.rendezvous.link_opened(connection)
        if surplus:
            connection.take(surplus)

    # Connections that end -------------------------------------------------------------------

    def link_ended(self, connection: Connection, *, clean: bool) -> None:
        """The peer has closed its side."""
        self.link_broke(connection, "its connection ended" + ("" if clean else " within a message"))

    def link_broke(self, connection: Connection, reason: str) -> None:
        """The connection to a peer is of no use any more."""
        if self.connections.get(connection.peer) is not connection:
            return
        del self.connections[connection.peer]
        connection.close()
        if connection.left:
            self.engine.peer_left(connection.peer)
        elif self.rendezvous is not None:
            self.rendezvous.link_lost(connection, reason)
        else:
            self.engine.peer_lost(connection.peer, f"rank {connection.peer} was lost: {reason}")

    def give_up(self, connection: Connection, reason: str) -> None:
        """A peer gives no sign of life: it counts as lost. It is told so, should it come back."""
        connection.given_up = True
        who = f"rank {self.rank} gave rank {connection.peer} up"
        self.engine.peer_lost(
            connection.peer, f"rank {connection.peer} was lost: {who}, since {reason}"
        )

    def close_in_child(self) -> None:
        """After a fork: this copy of the sockets would hide this rank's death from its peers."""
        sockets = [connection.sock for connection in self.connections.values()]
        if self.acceptor is not None:
            sockets += [
                self.acceptor.listener,
                *(pending.sock for pending in self.acceptor.pending),
            ]
        for sock in sockets:
            sock.close()

    def close(self) -> None:
        """Close every connection, and the acceptor."""
        if self.acceptor is not None:
            self.acceptor.close()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def all_sent(self) -> bool:
        """Whether the peers' kernels have every byte; if not, the reactor looks again soon."""
        connections = [
            connection for connection in self.connections.values() if not connection.given_up
        ]
        waiting = [connection for connection in connections if not connection.send_queue.all_sent()]
        if waiting and all(connection.send_queue.idle for connection in waiting):
            # Only the kernel is busy, which tells nobody when it is done.
            self.reactor.call_later(0.002, lambda: None)
        return not waiting


# ------------------------------------------------------------------------------
# The reactor: which sockets are ready, and what is due. One of these drives a `TcpEngine`.

Callback = Callable[[bool, bool], None]  # (readable, writable)

LONGEST_SLEEP = 3600.0


class Reactor:
    """Sockets with callbacks, and timers. `select` may be called while others change them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)

    def watch(
        self,
        sock: socket.socket | int,
        callback: Callback,
        *,
        read: bool = True,
        write: bool = False,
    ) -> None:
        """From now on call back when the socket, or file, is readable, writable, or either."""
        events = selectors.EVENT_READ * read | selectors.EVENT_WRITE * write
        if not events:
            self.forget(sock)
            return
        try:
            self._selector.modify(sock, events, callback)
        except KeyError:
            self._selector.register(sock, events, callback)

    def forget(self, sock: socket.socket | int) -> None:
        """Do not watch this socket any more."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back once, that many seconds from now."""
        heapq.heappush(self._timers, (monotonic() + seconds, next(self._order), callback))
        self.wake()

    def select(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a socket is ready or a timer is due, that many seconds at most."""
        seconds = min(seconds, LONGEST_SLEEP)
        if self._timers:
            seconds = min(seconds, self._timers[0][0] - monotonic())
        return self._selector.select(max(seconds, 0.0))

    def dispatch(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Call back for what `select` found, and for the timers that are due."""
        watched = self._selector.get_map()
        for key, mask in events:
            now = watched.get(key.fd)
            if now is not None and now.fileobj is key.fileobj:  # not closed by an earlier one
                now.data(bool(mask & selectors.EVENT_READ), bool(mask & selectors.EVENT_WRITE))
        while self._timers and self._timers[0][0] <= monotonic():
            heapq.heappop(self._timers)[2]()

    def wake(self) -> None:
        """Make a `select` in another thread return."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Free the reactor's own resources; the sockets are their owners' business."""
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _drain(self, readable: bool, writable: bool) -> None:
        with suppress(OSError):
            while self._woken.recv(4096):
                pass
