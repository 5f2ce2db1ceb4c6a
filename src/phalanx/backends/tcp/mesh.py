"""The mesh: this rank's connections to all others, each made when it is first needed."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.backends.engine import Engine, Failure, PostedSend
from phalanx.backends.tcp.door import CROSSED, Dial, Door
from phalanx.backends.tcp.link import Link
from phalanx.backends.tcp.reactor import Reactor
from phalanx.wire.frame import FrameError, Header, Kind
from phalanx.wire.handshake import Identity, Refused
from phalanx.wire.messages import FailureNotice, decode

if TYPE_CHECKING:
    from phalanx.backends.tcp.door import Address
    from phalanx.backends.tcp.rendezvous import Rendezvous

log = logging.getLogger("phalanx")


class Mesh:
    """Knows how to reach each peer, who is connected, who has left, and who is let in.

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
        self.door: Door | None = None
        self.links: dict[int, Link] = {}
        self.left: set[int] = set()  # peers that have closed in good order
        self.addresses: dict[int, list[Address]] = {}
        self.rendezvous: Rendezvous | None = None  # while the ranks are meeting
        self.last_rejection = ""
        self._dials: dict[int, Dial] = {}
        self._queued: dict[int, list[PostedSend]] = {}  # for peers that are being called

    @property
    def rank(self) -> int:
        """This rank."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.identity.world_size

    # Messages -------------------------------------------------------------------------------

    def send(self, send: PostedSend) -> None:
        """Send a message, once the peer is connected."""
        link = self.links.get(send.peer)
        if link is not None:
            link.send(send)
        else:
            self._queued.setdefault(send.peer, []).append(send)
            self.reach(send.peer)

    def retract(self, send: PostedSend) -> None:
        """Give up a message."""
        link = self.links.get(send.peer)
        if link is not None:
            link.retract(send)
        queued = self._queued.get(send.peer, [])
        if send in queued:
            queued.remove(send)

    def reach(self, peer: int) -> None:
        """See to it that messages from a peer can come."""
        link = self.links.get(peer)
        if link is not None:
            link.resume()
        elif not (peer in self._dials or peer in self.left or peer in self.engine.lost):
            self.dial(peer, self.addresses[peer], self._dial_failed(peer), patient=False)

    def control_came(self, link: Link, header: Header, payload: bytes) -> None:
        """A control frame came from a peer. Raises `FrameError` for one that makes no sense."""
        kind = header.channel.kind
        if kind is Kind.FAILURE:
            notice = decode(payload, FailureNotice)
            self.engine.failure_came(header.channel.group, Failure.from_notice(notice))
        elif kind is Kind.LEAVE:
            link.left = True
            self.left.add(link.peer)
            self.engine.peer_left(link.peer)
        elif self.rendezvous is not None:
            self.rendezvous.control_came(link, header, payload)
        else:
            raise FrameError(f"a {kind.name} frame after the rendezvous")

    # Connections that come to be ------------------------------------------------------------

    def open_door(self, listener: socket.socket) -> None:
        """Let peers in there."""
        self.door = Door(self, listener)

    def dial(
        self,
        peer: int,
        addresses: list[Address],
        failed: Callable[[Refused], None],
        *,
        patient: bool,
    ) -> None:
        """Call a peer; `failed(refusal)` is called if that cannot succeed."""
        self._dials[peer] = Dial(self, peer, addresses, failed, patient=patient)

    def trouble_with(self, peer: int) -> str:
        """Why a peer that is being called has not answered yet."""
        dial = self._dials.get(peer)
        return dial.trouble if dial is not None else "it was not called"

    def _dial_failed(self, peer: int) -> Callable[[Refused], None]:
        def failed(refusal: Refused) -> None:
            if refusal.reason == CROSSED:
                self._dials.pop(peer, None)  # its own call is at our door
            else:
                self._peer_gone(peer, f"it cannot be reached: {refusal.reason}")

        return failed

    def admit(self, peer: int) -> str | None:
        """Why a peer that has proved itself is turned away all the same, or None."""
        if peer in self.links or peer in self.left or peer in self.engine.lost:
            return f"rank {peer} is, or was, connected already: is a second copy of it running?"
        if peer in self._dials and self.rank < peer:
            return CROSSED
        return None

    def turned_away(self, what: str) -> None:
        """Someone was refused."""
        self.last_rejection = what
        log.warning("rank %d turned away %s", self.rank, what)

    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        """A peer has proved itself: messages can flow."""
        dial = self._dials.pop(peer, None)
        if dial is not None and dial.sock is not sock:
            dial.drop()
        link = Link(self, peer, sock)
        self.links[peer] = link
        if self.rendezvous is not None:
            self.rendezvous.link_opened(link)
        for send in self._queued.pop(peer, []):
            link.send(send)
        if surplus:
            link.take(surplus)

    # Connections that end -------------------------------------------------------------------

    def link_ended(self, link: Link, *, clean: bool) -> None:
        """The peer has closed its side."""
        self.link_broke(link, "its connection ended" + ("" if clean else " within a message"))

    def link_broke(self, link: Link, reason: str) -> None:
        """The connection to a peer is of no use any more."""
        if self.links.get(link.peer) is not link:
            return
        del self.links[link.peer]
        link.close()
        if link.left:
            self.engine.peer_left(link.peer)
        elif self.rendezvous is not None:
            self.rendezvous.link_lost(link, reason)
        else:
            self._peer_gone(link.peer, reason)

    def _peer_gone(self, peer: int, reason: str) -> None:
        dial = self._dials.pop(peer, None)
        if dial is not None:
            dial.drop()
        self.engine.peer_lost(peer, f"rank {peer} was lost: {reason}")

    def close_in_child(self) -> None:
        """After a fork: this copy of the sockets would hide this rank's death from its peers."""
        sockets = [link.sock for link in self.links.values()]
        sockets += [dial.sock for dial in self._dials.values()]
        if self.door is not None:
            sockets += [self.door.listener, *(knock.sock for knock in self.door.knocks)]
        for sock in sockets:
            sock.close()

    def close(self) -> None:
        """Close every connection, and the door."""
        for dial in self._dials.values():
            dial.drop()
        if self.door is not None:
            self.door.close()
        for link in self.links.values():
            link.close()
        self.links.clear()

    def all_sent(self) -> bool:
        """Whether the peers' kernels have every byte; if not, the reactor looks again soon."""
        waiting = [link for link in self.links.values() if not link.all_sent()]
        if waiting and all(link.idle for link in waiting):
            # Only the kernel is busy, which tells nobody when it is done.
            self.reactor.call_later(0.002, lambda: None)
        return not waiting
