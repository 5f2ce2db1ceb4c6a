"""The mesh: this rank's connections to all others.

All are opened in the rendezvous, before the first message. So all ranks notice a death at once,
a failure notice reaches a rank whatever it is doing, and a message can be sent to a rank that is
busy elsewhere.
"""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod

from typing_extensions import override

from phalanx.core.engine import Engine
from phalanx.core.failure import Failure
from phalanx.transport.shm.domain import HostDomain
from phalanx.transport.tcp.admission import Acceptor
from phalanx.transport.tcp.connection import Connection, MeshBase
from phalanx.transport.tcp.loop import Reactor
from phalanx.wire.control import Answer, Ask, FailureNotice, decode
from phalanx.wire.frame import FrameError, Header, Kind
from phalanx.wire.handshake import Identity

log = logging.getLogger("phalanx")


class Formation(ABC):
    """Told of connections while the group forms (rendezvous.py)."""

    @abstractmethod
    def link_opened(self, connection: Connection) -> None:
        """A peer is authenticated."""

    @abstractmethod
    def link_lost(self, connection: Connection, reason: str) -> None:
        """A peer is gone before all are connected."""

    @abstractmethod
    def told(self, failure: Failure) -> None:
        """Another rank says why the group cannot form."""

    @abstractmethod
    def control_came(self, connection: Connection, header: Header, payload: bytes) -> None:
        """A control frame came while the group forms. Raises `FrameError` if it makes no sense."""


class Mesh(MeshBase):
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
        self.rendezvous: Formation | None = None  # while the group forms
        self.last_rejection = ""
        self.host = ""  # the host's name, if it is given; "": the machine decides
        self.domain: HostDomain | None = None  # what this rank shows to others of its host

    @override
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
            if notice.culprit < 0 and notice.reporter == self.rank:
                return  # this rank's own word, which others pass on
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
            pass  # its arrival is its meaning
        elif self.rendezvous is not None:
            self.rendezvous.control_came(connection, header, payload)
        else:
            raise FrameError(f"a {kind.name} frame after the rendezvous")

    # Connections that come to be ------------------------------------------------------------

    def open_acceptor(self, listener: socket.socket) -> None:
        """Accept peers at this socket."""
        self.acceptor = Acceptor(self, listener)

    @override
    def admit(self, peer: int) -> str | None:
        """Why a peer is rejected although it is authenticated, or None."""
        if peer in self.connections or peer in self.left or peer in self.engine.lost:
            return f"rank {peer} is, or was, connected already: is a second copy of it running?"
        if peer < self.rank:
            return f"rank {self.rank} calls rank {peer}, not the other way round"
        return None

    @override
    def turned_away(self, what: str) -> None:
        """A caller was rejected."""
        self.last_rejection = what
        log.warning("rank %d turned away %s", self.rank, what)

    @override
    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        """A peer is authenticated: messages can flow."""
        connection = Connection(self, peer, sock)
        self.connections[peer] = connection
        if self.rendezvous is not None:
            self.rendezvous.link_opened(connection)
        if surplus:
            connection.take(surplus)

    # Connections that end -------------------------------------------------------------------

    @override
    def link_ended(self, connection: Connection, *, clean: bool) -> None:
        """The peer has closed its side."""
        self.link_broke(connection, "its connection ended" + ("" if clean else " within a message"))

    @override
    def link_broke(self, connection: Connection, reason: str) -> None:
        """The connection to a peer has failed."""
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

    @override
    def give_up(self, connection: Connection, reason: str) -> None:
        """A peer gives no sign of life: it counts as lost, and is told so if it comes back."""
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
