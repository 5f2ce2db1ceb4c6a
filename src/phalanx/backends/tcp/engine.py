"""The engine over TCP: one connection to each peer, made when first needed, and one reactor.

Whoever waits drives: the thread in `progress` runs the reactor until its operation is done, and
thereby moves everybody's bytes. Other threads that wait meanwhile sleep on a condition. Only when
an asynchronous operation is outstanding is there a thread that drives in the background.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from phalanx.backends.engine import Engine
from phalanx.backends.failure import Failure
from phalanx.backends.group import Group
from phalanx.backends.operation import Operation
from phalanx.backends.simulated import LONGEST_WAIT
from phalanx.backends.tcp.door import CROSSED, Dial, Door
from phalanx.backends.tcp.link import Link
from phalanx.backends.tcp.reactor import Reactor
from phalanx.backends.ticket import PostedSend
from phalanx.wire.frame import FrameError, Header, Kind
from phalanx.wire.handshake import Identity, Refused
from phalanx.wire.messages import FailureNotice, decode, encode

if TYPE_CHECKING:
    from phalanx.backends.tcp.door import Address
    from phalanx.backends.tcp.rendezvous import Rendezvous

log = logging.getLogger("phalanx")

EXPIRY_CHECK = 0.25  # seconds between looks at the deadlines of operations nobody waits for


class Awaited(Protocol):
    """Something that will be done."""

    @property
    def done(self) -> bool:
        """Whether it is."""
        ...


class TcpEngine(Engine):
    """Moves bytes over sockets. `addresses[rank]` is where to call each peer."""

    def __init__(self, identity: Identity, token: bytes, *, loopback_only: bool) -> None:
        super().__init__(identity.rank, identity.world_size)
        self.identity = identity
        self.token = token
        self.loopback_only = loopback_only
        self.reactor = Reactor()
        self.door: Door | None = None
        self.links: dict[int, Link] = {}
        self.addresses: dict[int, list[Address]] = {}
        self.rendezvous: Rendezvous | None = None
        self.last_rejection = ""
        self._dials: dict[int, Dial] = {}
        self._queued: dict[int, list[PostedSend]] = {}  # for peers that are being dialled
        self._left: set[int] = set()
        self._condition = threading.Condition(self.lock)
        self._driver: int | None = None
        self._background: set[Operation] = set()
        self._thread: threading.Thread | None = None

    # What an engine does --------------------------------------------------------------------

    @override
    def transmit(self, send: PostedSend) -> None:
        link = self.links.get(send.peer)
        if link is not None:
            link.send(send)
        else:
            self._queued.setdefault(send.peer, []).append(send)
            self.reach(send.peer)

    @override
    def reach(self, peer: int) -> None:
        link = self.links.get(peer)
        if link is not None:
            link.resume()
        elif peer not in self._dials and peer not in self.lost:
            self.dial(peer, self.addresses[peer], self._dial_failed(peer), patient=False)

    @override
    def retract(self, send: PostedSend) -> None:
        link = self.links.get(send.peer)
        if link is not None:
            link.retract(send)
        queued = self._queued.get(send.peer, [])
        if send in queued:
            queued.remove(send)

    @override
    def tell(self, group: Group, failure: Failure) -> None:
        payload = encode(failure.notice())
        for rank in group.ranks:
            link = self.links.get(rank)
            if link is not None and not link.left and rank != failure.culprit:
                link.send_control(Kind.FAILURE, payload, group.id)

    @override
    def has_left(self, peer: int) -> bool:
        return peer in self._left

    # Driving --------------------------------------------------------------------------------

    @override
    def progress(self, until: Operation) -> None:
        with self.lock:
            while not until.done:
                remaining = until.deadline - monotonic()
                if remaining <= 0:
                    until.group.expire(until)
                    self.run_ready()
                elif self._driver is None:
                    self.drive(until, until.deadline)
                else:
                    self._condition.wait(min(remaining, LONGEST_WAIT))

    @override
    def poll(self) -> None:
        with self.lock:
            if self._driver is None and not self.closed:
                self._turn(0.0)

    def drive(self, until: Awaited, deadline: float) -> None:
        """Run the reactor until that is done or the deadline has passed. Lock held."""
        self._driver = threading.get_ident()
        try:
            while not until.done and not self.closed:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return
                self._turn(remaining)
        finally:
            self._driver = None
            self._condition.notify_all()

    def _turn(self, seconds: float) -> None:
        self.lock.release()
        try:
            events = self.reactor.select(seconds)
        finally:
            self.lock.acquire()
        if not self.closed:
            self.reactor.dispatch(events)
            self.run_ready()

    @override
    def in_background(self, operation: Operation) -> None:
        with self.lock:
            if operation.done:
                return
            self._background.add(operation)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_background, name=f"phalanx rank {self.rank}", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()

    def _run_background(self) -> None:
        with self.lock:
            while not self.closed:
                if not self._background:
                    self._condition.wait()
                elif self._driver is not None:
                    self._condition.wait(EXPIRY_CHECK)
                else:
                    self.drive(_NothingLeft(self._background), monotonic() + EXPIRY_CHECK)
                now = monotonic()
                for operation in [op for op in self._background if op.deadline <= now]:
                    operation.group.expire(operation)
                self.run_ready()

    @override
    def operation_done(self, operation: Operation) -> None:
        self._background.discard(operation)
        self._condition.notify_all()

    # Connections ----------------------------------------------------------------------------

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
        return dial.trouble if dial is not None else ""

    def _dial_failed(self, peer: int) -> Callable[[Refused], None]:
        def failed(refusal: Refused) -> None:
            if refusal.reason == CROSSED:
                self._dials.pop(peer, None)  # its own call is at our door
            else:
                self.peer_gone(peer, f"it cannot be reached: {refusal.reason}")

        return failed

    def admit(self, peer: int) -> str | None:
        """Why a peer that has proved itself is turned away all the same, or None."""
        if peer in self.links or peer in self._left or peer in self.lost:
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

    def control_came(self, link: Link, header: Header, payload: bytes) -> None:
        """A control frame came from a peer. Raises `FrameError` for one that makes no sense."""
        kind = header.channel.kind
        if kind is Kind.FAILURE:
            notice = decode(payload, FailureNotice)
            self.failure_came(header.channel.group, Failure.from_notice(notice))
        elif kind is Kind.LEAVE:
            link.left = True
            self._left.add(link.peer)
            self.peer_left(link.peer)
        elif self.rendezvous is not None:
            self.rendezvous.control_came(link, header, payload)
        else:
            raise FrameError(f"a {kind.name} frame after the rendezvous")

    def link_ended(self, link: Link, *, clean: bool) -> None:
        """The peer has closed its side."""
        if link.left and clean:
            self._drop_link(link)
            self.peer_left(link.peer)
        else:
            self.link_broke(link, "its connection ended" + ("" if clean else " within a message"))

    def link_broke(self, link: Link, reason: str) -> None:
        """The connection to a peer is of no use any more."""
        if self.links.get(link.peer) is not link:
            return
        self._drop_link(link)
        if link.left:
            self.peer_left(link.peer)
        elif self.rendezvous is not None:
            self.rendezvous.link_lost(link, reason)
        else:
            self.peer_gone(link.peer, reason)

    def peer_gone(self, peer: int, reason: str) -> None:
        """A peer has died, or cannot be reached."""
        dial = self._dials.pop(peer, None)
        if dial is not None:
            dial.drop()
        self.peer_lost(peer, f"rank {peer} was lost: {reason}")

    def _drop_link(self, link: Link) -> None:
        del self.links[link.peer]
        link.close()

    # The end --------------------------------------------------------------------------------

    def say_goodbye(self, seconds: float) -> None:
        """Tell every peer, and see to it that what was sent has left this process. Lock held."""
        for link in list(self.links.values()):
            link.send_control(Kind.LEAVE)
        if self._driver is None:
            self.drive(_AllSent(self), monotonic() + seconds)

    def shut(self) -> None:
        """Close everything. Lock held."""
        if self.closed:
            return
        self.closed = True
        for dial in self._dials.values():
            dial.drop()
        if self.door is not None:
            self.door.close()
        for link in list(self.links.values()):
            self._drop_link(link)
        self.reactor.wake()
        self._condition.notify_all()
        thread = self._thread
        while self._driver is not None and self._driver != threading.get_ident():
            self._condition.wait()
        self.reactor.close()
        if thread is not None and thread is not threading.current_thread():
            self.lock.release()
            try:
                thread.join()
            finally:
                self.lock.acquire()


class _NothingLeft:
    """Until no operation is outstanding in the background."""

    def __init__(self, operations: set[Operation]) -> None:
        self._operations = operations

    @property
    def done(self) -> bool:
        return not self._operations


class _AllSent:
    """Until the peers' kernels have everything that was sent."""

    def __init__(self, engine: TcpEngine) -> None:
        self._engine = engine

    @property
    def done(self) -> bool:
        waiting = [link for link in self._engine.links.values() if not link.all_sent()]
        if waiting and all(link.idle for link in waiting):
            # Only the kernel is busy, which tells nobody when it is done: look again soon.
            self._engine.reactor.call_later(0.002, lambda: None)
        return not waiting
