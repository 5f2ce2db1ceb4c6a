"""The courier: the engine's messages and control frames, carried by a library's messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from phalanx.backends.engine import Failure, PostedSend
from phalanx.backends.library.correspondent import Correspondent
from phalanx.backends.library.flights import Flight, Flights
from phalanx.backends.library.library import Handle, Library
from phalanx.wire.frame import Channel, FrameError, Kind
from phalanx.wire.messages import Answer, Ask, FailureNotice, decode

if TYPE_CHECKING:
    from phalanx.backends.library.engine import LibraryEngine


class Courier:
    """Sends and receives for one rank. All methods are called with the engine's lock held.

    library   None: nobody is there to send to
    """

    def __init__(self, engine: LibraryEngine, library: Library | None) -> None:
        self.engine = engine
        self.library = library
        self.calls_back = library is not None and library.can.calls_back
        self.left: set[int] = set()  # peers that have closed in good order
        self._flights = Flights()
        self._peers: dict[int, Correspondent] = {}

    def begin(self) -> None:
        """Listen to every peer."""
        for rank in range(self.engine.world_size):
            if rank != self.engine.rank:
                assert self.library is not None
                self._peers[rank] = Correspondent(self, self.library, rank)
                self._peers[rank].listen()

    def poll(self) -> bool:
        """See to what is over; whether anything was."""
        return self._flights.poll()

    def may_go(self, *, let_go: bool) -> bool:
        """Whether those who are there have got every word, and (if asked for) have let this go."""
        here = [peer for peer in self._peers.values() if self._is_here(peer)]
        return not any(peer.words_out or (let_go and not peer.let_go) for peer in here)

    def close(self) -> None:
        """Nothing that comes from now on is for anybody."""
        self._flights.clear()
        if self.library is not None:
            self.library.close()

    # For the engine -------------------------------------------------------------------------

    def send(self, send: PostedSend) -> None:
        """Send a message. To a peer whose loss is just being told, it goes nowhere."""
        peer = self._peers.get(send.peer)
        if peer is not None and self._is_here(peer):
            peer.send(send)

    def send_control(self, rank: int, kind: Kind, payload: bytes = b"", group: int = 0) -> None:
        """Send a control message, if the peer is there."""
        peer = self._peers.get(rank)
        if peer is not None and self._is_here(peer):
            peer.send_control(kind, payload, group)

    def send_control_to_all(self, kind: Kind) -> None:
        """Send a control message to every peer that is there."""
        for rank in self._peers:
            self.send_control(rank, kind)

    def retract(self, send: PostedSend) -> None:
        """Give up a message."""
        if send.peer in self._peers:
            self._peers[send.peer].retract(send)

    def settle(self, send: PostedSend) -> bool:
        """Whether a message that would be given up has gone already."""
        return send.peer in self._peers and self._peers[send.peer].settle(send)

    def resume(self, rank: int) -> None:
        """There may be room again for what a peer sends."""
        if rank in self._peers:
            self._peers[rank].resume()

    # For the correspondents -----------------------------------------------------------------

    def fly(
        self, peer: Correspondent, handle: Handle, memory: memoryview, landed: Callable[[], None]
    ) -> Flight:
        """Something was started with a peer."""
        flight = Flight(handle, memory, landed, partial(self.failed, peer))
        self._flights.add(flight)
        return flight

    def failed(self, peer: Correspondent, error: Exception) -> None:
        """The library moves nothing to or from a peer any more."""
        peer.heed_farewells()
        self.lose(peer.peer, f"{peer.library.name} says: {first_line(error)}")

    def lose(self, rank: int, reason: str) -> None:
        """A peer counts as lost, unless it has left."""
        if rank not in self.left:
            self.engine.peer_lost(rank, f"rank {rank} was lost: {reason}")

    def tell_room(self, rank: int) -> None:
        """There is no room for what a peer sends, or there is again: which it may wait for."""
        self.engine.answer(rank, self.engine.state_for(rank))

    def control_came(self, peer: Correspondent, channel: Channel, payload: bytes) -> None:
        """A control message came. Raises `FrameError` for one that makes no sense."""
        engine, group, kind = self.engine, channel.group, channel.kind
        if kind is Kind.FAILURE:
            notice = decode(payload, FailureNotice)
            if not (-1 <= notice.culprit < engine.world_size > notice.reporter >= 0):
                raise FrameError(f"word of a failure of rank {notice.culprit}")
            engine.failure_came(group, Failure.from_notice(notice))
        elif kind is Kind.LEAVE_GROUP:
            engine.member_leaves(group, peer.peer)
        elif kind is Kind.LEAVE:
            self.left.add(peer.peer)
            engine.peer_leaves(peer.peer, partial(peer.send_control, Kind.BEAT))
        elif kind is Kind.BEAT:
            peer.let_go = True
        elif kind is Kind.ASK:
            engine.asked(group, peer.peer, decode(payload, Ask))
        elif kind is Kind.ANSWER:
            engine.answered(peer.peer, decode(payload, Answer))
        else:
            raise FrameError(f"a {kind.name} frame, which no library carries")

    def _is_here(self, peer: Correspondent) -> bool:
        return peer.peer not in self.left and peer.peer not in self.engine.lost


def first_line(error: Exception) -> str:
    """A library's error as a part of a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
