"""The mesh: this rank's connections to all others.

All are made when the ranks meet, before the first message. So whoever dies is missed at once by
everyone, word of a failure reaches a rank whatever it is doing, and a message can be sent to a rank
that is busy elsewhere.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from phalanx.backends.engine import Engine, Failure, PostedSend
from phalanx.backends.tcp.door import Door
from phalanx.backends.tcp.link import Link
from phalanx.backends.tcp.reactor import Reactor
from phalanx.wire.frame import FrameError, Header, Kind
from phalanx.wire.handshake import Identity
from phalanx.wire.messages import Answer, Ask, FailureNotice, decode

if TYPE_CHECKING:
    from phalanx.backends.shm.commons import Commons
    from phalanx.backends.tcp.rendezvous import Rendezvous

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
        self.door: Door | None = None
        self.links: dict[int, Link] = {}
        self.left: set[int] = set()  # peers that have closed in good order
        self.rendezvous: Rendezvous | None = None  # while the ranks are meeting
        self.last_rejection = ""
        self.host = ""  # what this rank's host counts as; "": what it is
        self.commons: Commons | None = None  # what this rank shows to others of its host

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
        """Send a message. To a peer whose loss is just being told, it goes nowhere."""
        link = self.links.get(send.peer)
        if link is not None:
            link.outbox.send(send)

    def retract(self, send: PostedSend) -> None:
        """Give up a message."""
        link = self.links.get(send.peer)
        if link is not None:
            link.outbox.retract(send)

    def settle(self, send: PostedSend) -> bool:
        """Whether a message that would be given up has gone already."""
        link = self.links.get(send.peer)
        return link is not None and link.outbox.settle(send)

    def resume(self, peer: int) -> None:
        """There may be room again for what a peer sends."""
        link = self.links.get(peer)
        if link is not None:
            link.resume()

    def control_came(self, link: Link, header: Header, payload: bytes) -> None:
        """A control frame came from a peer. Raises `FrameError` for one that makes no sense."""
        group, kind = header.channel.group, header.channel.kind
        if kind is Kind.FAILURE:
            notice = decode(payload, FailureNotice)
            if not (0 <= notice.culprit < self.world_size > notice.reporter >= 0):
                raise FrameError(
                    f"word of a failure of rank {notice.culprit}, from rank {notice.reporter}: "
                    f"there are {self.world_size} ranks"
                )
            failure = Failure.from_notice(notice)
            if self.rendezvous is not None:
                self.rendezvous.told(failure)
            self.engine.failure_came(group, failure)
        elif kind is Kind.LEAVE_GROUP:
            self.engine.member_left(group, link.peer)
        elif kind is Kind.LEAVE:
            link.left = True
            self.left.add(link.peer)
            self.engine.peer_left(link.peer)
        elif kind is Kind.ASK:
            self.engine.asked(group, link.peer, decode(payload, Ask))
        elif kind is Kind.ANSWER:
            self.engine.answered(link.peer, decode(payload, Answer))
        elif kind is Kind.BEAT:
            pass  # that it came is all that it says
        elif self.rendezvous is not None:
            self.rendezvous.control_came(link, header, payload)
        else:
            raise FrameError(f"a {kind.name} frame after the rendezvous")

    # Connections that come to be ------------------------------------------------------------

    def open_door(self, listener: socket.socket) -> None:
        """Let peers in there."""
        self.door = Door(self, listener)

    def admit(self, peer: int) -> str | None:
        """Why a peer that has proved itself is turned away all the same, or None."""
        if peer in self.links or peer in self.left or peer in self.engine.lost:
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
        link = Link(self, peer, sock)
        self.links[peer] = link
        if self.rendezvous is not None:
            self.rendezvous.link_opened(link)
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
            self.engine.peer_lost(link.peer, f"rank {link.peer} was lost: {reason}")

    def give_up(self, link: Link, reason: str) -> None:
        """A peer gives no sign of life: it counts as lost. It is told so, should it come back."""
        link.given_up = True
        who = f"rank {self.rank} gave rank {link.peer} up"
        self.engine.peer_lost(link.peer, f"rank {link.peer} was lost: {who}, since {reason}")

    def close_in_child(self) -> None:
        """After a fork: this copy of the sockets would hide this rank's death from its peers."""
        sockets = [link.sock for link in self.links.values()]
        if self.door is not None:
            sockets += [self.door.listener, *(knock.sock for knock in self.door.knocks)]
        for sock in sockets:
            sock.close()

    def close(self) -> None:
        """Close every connection, and the door."""
        if self.door is not None:
            self.door.close()
        for link in self.links.values():
            link.close()
        self.links.clear()

    def all_sent(self) -> bool:
        """Whether the peers' kernels have every byte; if not, the reactor looks again soon."""
        links = [link for link in self.links.values() if not link.given_up]
        waiting = [link for link in links if not link.outbox.all_sent()]
        if waiting and all(link.outbox.idle for link in waiting):
            # Only the kernel is busy, which tells nobody when it is done.
            self.reactor.call_later(0.002, lambda: None)
        return not waiting
