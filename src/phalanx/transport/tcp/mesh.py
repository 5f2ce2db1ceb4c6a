"""The mesh: this rank's connections to all others.

Of up to 16 ranks, all connections are opened in the rendezvous, before the first message. So all
ranks notice a death at once, a failure notice reaches a rank whatever it is doing, and a message
can be sent to a rank that is busy elsewhere.

More ranks make a *wide* mesh: each is connected with some neighbours from the start, and hears of
deaths and failures from them. It is connected with others from the first message on, and listens
for their calls until it closes (`flooding.py`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.core.engine import Engine
from phalanx.core.failure import Failure
from phalanx.core.transport import HostMemory
from phalanx.transport.crowding import Crowding
from phalanx.transport.tcp.admission import HUNG_UP
from phalanx.transport.tcp.connection import Connection, TlsConnection
from phalanx.transport.tcp.loop import Reactor
from phalanx.transport.tcp.tls import INSTALL, Tls, TlsSocket
from phalanx.wire.control import Address, FailureNotice
from phalanx.wire.frame import FrameError, Kind
from phalanx.wire.handshake import Identity, Refused

if TYPE_CHECKING:
    from phalanx.transport.tcp.flooding import Flooding

log = logging.getLogger("phalanx")


class Mesh:
    """This rank's connections.

    token       the job's secret; without one only callers of this host are let in
    tls         the TLS settings for peers on other hosts
    host        the host's name, if it is given; "": the machine decides
    crowding    says whether other programs take this host's cores, where each rank has one
    refused     the peers whose connection is to be told of room: `resume`
    domain      the memory that this rank shows to others of its host, if any
    addresses   the listening address of each rank, once known: before, the rendezvous judges the
                end of a connection (`gone`, by rank) and word of a failure (`told`)
    rendezvous  takes its control frames (peer, kind, payload), while the ranks meet
    shares      whether local peers have ring buffers
    wide        the additions of a wide mesh; else None

    All methods are called with the engine's lock held.
    """

    def __init__(
        self, engine: Engine, identity: Identity, token: bytes, tls: Tls | None = None
    ) -> None:
        self.engine = engine
        self.reactor = Reactor()
        self.crowding: Crowding | None = None
        self.identity = identity
        self.rank, self.world_size = identity.rank, identity.world_size
        self.label, self.callers = f"rank {identity.rank}", identity.world_size
        self.token = token
        self.tls = tls or Tls(token)
        self.connections: dict[int, Connection] = {}
        self.refused: set[int] = set()
        self.addresses: dict[int, Address] = {}
        self.gone: dict[int, str] = {}
        self.told: Failure | None = None
        self.rendezvous: Callable[[int, Kind, bytes], None] | None = None
        self.host = ""
        self.domain: HostMemory | None = None
        self.shares = False
        self.wide: Flooding | None = None
        self._told_readable = False
        engine.in_child.append(self.close_in_child)

    @property
    def speaks_tls(self) -> bool:
        """True if this rank speaks TLS to any of its peers."""
        return any(isinstance(each, TlsConnection) for each in self.connections.values())

    @property
    def all_known(self) -> bool:
        """True if this rank has the listening address of each rank."""
        return len(self.addresses) == self.world_size

    def admit(self, peer: int) -> str | None:
        """Return why a peer is turned away although it is authenticated, or None (see `Door`)."""
        if self.wide is not None and not self.wide.accepts(peer):
            raise Refused(HUNG_UP, final=False)  # without a word in the log
        if peer in self.connections or peer in self.engine.left or peer in self.engine.lost:
            return f"rank {peer} is, or was, connected already: is a second copy of it running?"
        if peer < self.rank and self.wide is None:
            return f"rank {self.rank} calls rank {peer}, not the other way round"
        return None

    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        """Take an authenticated peer: messages can flow. `surplus` came behind the handshake."""
        if isinstance(sock, TlsSocket):
            connection: Connection = TlsConnection(self, peer, sock)
        else:
            connection = Connection(self, peer, sock)
        self.connections[peer] = connection
        if self.rank == 0 and not self._told_readable and self.tls.is_readable(sock):
            self._told_readable = True
            log.warning(
                "what ranks on different hosts send can be read on its way: %s on every host, and "
                "it is encrypted (PHALANX_TLS=off: without this line)",
                INSTALL,
            )
        if self.shares:
            connection.out = connection.ring
        if self.wide is not None:
            self.wide.opened(connection)
        connection.take(surplus)

    def link_broke(self, connection: Connection, reason: str) -> None:
        """Handle the end, or failure, of a peer's connection."""
        peer = connection.peer
        if self.connections.get(peer) is not connection:
            connection.close()
            return
        del self.connections[peer]
        connection.close()
        if connection.left:
            self.engine.peer_left(peer)
        elif self.all_known:
            self.rank_lost(peer, reason)
        else:
            self.gone[peer] = reason
            if self.rank == 0:  # it may return
                self.addresses.pop(peer, None)
                log.warning("rank 0: rank %d came and was lost: %s", peer, reason)

    def rank_lost(self, peer: int, reason: str) -> None:
        """Handle a peer that is gone without closing, as this rank has found."""
        reason = f"rank {peer} was lost: {reason}"
        if self.wide is not None:
            self.wide.rank_lost(peer, reason)
        self.engine.peer_lost(peer, reason)

    def is_own_word(self, notice: FailureNotice) -> bool:
        """Return whether a failure notice is this rank's own, passed on by others; else note it.

        Raises `FrameError` if it makes no sense.
        """
        # A library may not know whose fault it was: then the culprit is -1.
        if not (-1 <= notice.culprit < self.world_size > notice.reporter >= 0):
            raise FrameError(
                f"word of a failure of rank {notice.culprit}, from rank {notice.reporter}: "
                f"there are {self.world_size} ranks"
            )
        if notice.culprit < 0 and notice.reporter == self.rank:
            return True
        if not self.all_known:
            self.told = self.told or Failure.from_notice(notice)
        return False

    def close_in_child(self) -> None:
        """Close a forked child's copy: it would hide this rank's death, or could write to peers."""
        for connection in self.connections.values():
            connection.sock.close()
        for sock in self.wide.sockets() if self.wide is not None else ():
            sock.close()
        if self.domain is not None:
            self.domain.detach()

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        if self.wide is not None:
            self.wide.close()

    def all_sent(self) -> bool:
        """Return whether the peers' kernels have every byte; if not, the reactor looks again."""
        waiting = [
            connection
            for connection in self.connections.values()
            if not (connection.given_up or connection.all_sent())
        ]
        if waiting and all(connection.idle for connection in waiting):
            # Only the kernel is busy, which tells nobody when it is done.
            self.reactor.call_later(0.002, lambda: None)
        return not waiting
