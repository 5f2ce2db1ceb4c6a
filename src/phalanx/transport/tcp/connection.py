"""The mesh, this rank's connections to all others; and a connection: frames in, frames out.

Of up to 16 ranks, all connections are opened in the rendezvous, before the first message. So all
ranks notice a death at once, a failure notice reaches a rank whatever it is doing, and a message
can be sent to a rank that is busy elsewhere.

More ranks make a *wide* mesh: each is connected with some neighbours from the start, and hears of
deaths and failures from them. It is connected with others from the first message on, and listens
for their calls until it closes (`flooding.py`).
"""

from __future__ import annotations

import fcntl
import logging
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from typing_extensions import override

from phalanx.core.engine import Engine
from phalanx.core.failure import Failure
from phalanx.core.matching import IncomingMessage
from phalanx.core.posted import PostedSend
from phalanx.core.transport import HostMemory, Ring
from phalanx.transport.crowding import Crowding
from phalanx.transport.tcp.admission import HUNG_UP
from phalanx.transport.tcp.loop import READ, WRITE, Reactor
from phalanx.transport.tcp.tls import INSTALL, Tls, TlsSocket
from phalanx.wire.control import Address, Answer, Ask, FailureNotice, decode
from phalanx.wire.frame import (
    MAX_PAYLOAD,
    Channel,
    FrameDecoder,
    FrameError,
    Header,
    Kind,
    pack_header,
)
from phalanx.wire.handshake import Identity, Refused

if TYPE_CHECKING:
    from phalanx.transport.tcp.flooding import Flooding

log = logging.getLogger("phalanx")

SMALL = 16 << 10  # bytes of a message that is copied rather than queued
READS_AT_A_TIME = 8  # then other connections are read
NONE = -1  # no frame of a message has begun
MESSAGES: Mapping[Kind, type[FailureNotice | Ask | Answer]] = MappingProxyType(
    {Kind.FAILURE: FailureNotice, Kind.ASK: Ask, Kind.ANSWER: Answer}
)

# TCP resends within a second after a short outage (TCP_RTO_MAX_MS: Linux 6.15, uapi tcp.h).
TCP_RTO_MAX_MS = 44
LONGEST_RETRANSMIT = 1000  # milliseconds, the least that the kernel takes

Option: TypeAlias = "tuple[int, int, int | bytes]"
OPTIONS: tuple[Option, ...] = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_RETRANSMIT),
)

# Inside a host no packet is lost, so nothing is gained by a sender that paces itself: with BBR,
# large messages take half as long again as with reno, which every user may choose. And a sender
# should not be far ahead: 2.5 GB/s for the 0.1 ms until a receiver runs are 256 KiB. Bytes beyond
# that have left the caches before they are read. But where cores are short the receiver waits for
# its turn on one, a millisecond and more for each buffer: then the kernel chooses the size, up to
# 4 MiB, as it does without the option (SO_BUF_LOCK: Linux 5.15, uapi asm-generic/socket.h). Not for
# more ranks than cores: with these buffers four on two take 1.4 times as long for 256 MiB.
SO_BUF_LOCK = 72
SMALL_BUFFER: Option = (socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
BUFFER_OF_THE_KERNEL: Option = (socket.SOL_SOCKET, SO_BUF_LOCK, 0)
INSIDE_A_HOST: tuple[Option, ...] = (
    (socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno"),
    SMALL_BUFFER,
)


def set_options(sock: socket.socket) -> bool:
    """Set the options above, as far as the kernel knows them; return whether it is in a host."""
    options = OPTIONS
    with suppress(OSError):  # a connection that is broken already is noticed later
        if sock.getsockname()[:1] == sock.getpeername()[:1]:
            options += INSIDE_A_HOST
    for option in options:
        with suppress(OSError):
            sock.setsockopt(*option)
    return len(options) > len(OPTIONS)


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


class Connection:
    """Frames to and from one peer, over a non-blocking socket.

    Messages go out in the order of `send`; control frames go before them, at the next boundary of a
    frame. Large ones go through a ring buffer, on one host, once that is `out`.

    left       the peer has said that it closes
    heard      whether a byte has arrived since this was last set to False
    given_up   the peer counts as lost, though the connection is there

    All methods are called with the engine's lock held.
    """

    def __init__(self, mesh: Mesh, peer: int, sock: socket.socket) -> None:
        self._sizes_buffer = set_options(sock)
        self._crowded = False
        self.mesh = mesh
        self.peer = peer
        self.sock = sock
        self.left = self.heard = self.given_up = False
        self.out: Ring | None = None
        self._ring: Ring | None = None
        self._owed = 0  # pieces of the peer's ring buffer that were read but not acknowledged
        self._decoder = FrameDecoder(self)
        self._arrival: IncomingMessage | None = None
        self._queue: deque[PostedSend] = deque()
        self._begun = NONE  # bytes of the first of them that are in frames which have begun
        self._control: deque[bytes] = deque()
        self._pieces: list[memoryview] = []  # the rest of the frame that is being written
        self._events = 0
        self._watch(READ)

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._events = events
            self.mesh.reactor.watch(self.sock, self.on_ready, events)

    # Out ------------------------------------------------------------------------------------

    def send(self, send: PostedSend) -> None:
        """Send a message: a small one at once, as the socket nearly always takes it; or queue it.

        Then write what can be written.
        """
        view = send.view
        size = len(view)
        if size <= SMALL and not (self._pieces or self._queue or self._control):
            work = send.work
            header = pack_header(
                work.channel, fingerprint=work.call.fingerprint, length=size, total=size
            )
            message = header + view
            try:
                written = self.sock.send(message)
            except OSError:
                pass  # `flush` handles it
            else:
                send.complete()
                if written < len(message):
                    self._pieces = [memoryview(message)[written:]]
                    self.flush()
                return
        self._queue.append(send)
        self.flush()

    def send_control(
        self, kind: Kind, payload: bytes = b"", *, group: int = 0, number: int = 0
    ) -> None:
        """Put a control frame before the messages that have not begun."""
        size = len(payload)
        header = pack_header(Channel(group, kind, number), length=size, total=size)
        self._control.append(header + payload)
        self.flush()

    def cancel(self, send: PostedSend) -> None:
        """Give up a message. If it has begun, finish its frame from a copy and send CANCEL."""
        if send not in self._queue:
            return
        if send is not self._queue[0] or self._begun == NONE:
            self._queue.remove(send)
            return
        self._let_go()
        channel = send.work.channel
        self.send_control(Kind.CANCEL, group=channel.group, number=channel.number)

    def finish_send(self, send: PostedSend) -> bool:
        """Return whether a message to be given up counts as sent: its last frame has begun.

        The peer gets it whole in any case; the rest of the frame is written from a copy.
        """
        if not self._queue or self._queue[0] is not send or self._begun != len(send.view):
            return False
        self._let_go()
        send.complete()
        return True

    def _let_go(self) -> None:
        """Take the message that has begun out of the queue; its frame is written from a copy."""
        self._pieces = [memoryview(bytes(piece)) for piece in self._pieces]
        self._queue.popleft()
        self._begun = NONE

    @property
    def idle(self) -> bool:
        """True if nothing is left to write."""
        return not (self._pieces or self._queue or self._control)

    def all_sent(self) -> bool:
        """Return whether the peer's kernel has acknowledged every byte (if that can be known)."""
        if not self.idle:
            return False
        try:
            unsent = fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0" * 4)
        except OSError:
            return True
        return int.from_bytes(unsent, sys.byteorder) == 0

    def flush(self) -> None:
        """Write as much as the socket takes."""
        try:
            while self._pieces or self._next_frame():
                pieces = self._pieces
                written = self.sock.sendmsg(pieces)
                while pieces and written >= len(pieces[0]):
                    written -= len(pieces[0])
                    del pieces[0]
                if written:
                    pieces[0] = pieces[0][written:]
        except BlockingIOError:
            if self._sizes_buffer and self.mesh.crowding is not None:
                self._size_buffer(self.mesh.crowding)
            self._watch(self._events | WRITE)
            return
        except OSError as error:
            # The peer's last bytes are still to be read; the read then ends the connection.
            log.debug("writing to rank %d failed: %s", self.peer, error)
            self._queue.clear()
            self._begun = NONE
            self._control.clear()
            self._pieces = []
        if self._events & WRITE:
            self._watch(self._events & ~WRITE)

    def _size_buffer(self, crowding: Crowding) -> None:
        """Keep the send buffer small, or have the kernel size it while cores are short."""
        crowded = crowding.at(self.mesh.engine.now())
        if crowded is not self._crowded:
            self._crowded = crowded
            with suppress(OSError):
                self.sock.setsockopt(*(BUFFER_OF_THE_KERNEL if crowded else SMALL_BUFFER))

    def _next_frame(self) -> bool:
        """Take the next frame to write; False if there is none."""
        if self._queue and self._begun == len(self._queue[0].view):  # its last frame is written
            self._begun = NONE
            self._queue.popleft().complete()
        if self._control:
            self._pieces = [memoryview(self._control.popleft())]
            return True
        if not self._queue:
            return False
        send = self._queue[0]
        work, view = send.work, send.view
        total, start = len(view), max(self._begun, 0)
        if self.out is not None and total >= self.out.least:
            frame = self.out.put(send, start)
            if frame is None:  # it is full. Control frames may go first
                self.out.when_free(self.flush)
                return False
            self._pieces = [memoryview(frame)]
            self._begun = min(start + self.out.piece, total)
            return True
        payload = view[start : start + MAX_PAYLOAD]
        size = len(payload)
        header = pack_header(
            work.channel,
            fingerprint=work.call.fingerprint,
            length=size,
            total=total,
            offset=start,
        )
        self._pieces = [memoryview(header), payload] if size else [memoryview(header)]
        self._begun = start + size
        return True

    # In -------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """True if nothing is read from the peer, as there is no room for its messages."""
        return self._decoder.paused

    def on_ready(self, readable: bool, writable: bool) -> None:
        """Read from the socket, or write to it: it is ready (from the reactor)."""
        if writable:
            self.flush()
        decoder = self._decoder
        try:
            for _ in range(READS_AT_A_TIME if readable else 0):
                space = decoder.space()
                if not len(space):
                    self._watch(self._events & ~READ)
                    self._tell_room()
                    return
                count = self.sock.recv_into(space)
                if count == 0:
                    self._ended()
                    return
                self.heard = True
                decoder.received(count)
                # The next message stays in the socket unless it belongs to a posted receive: the
                # rank that has received its message posts the next receive first, so fewer
                # messages are unexpected and have to be copied.
                arrival = self._arrival
                if count < len(space) or arrival is None or arrival.kept:
                    return
                if arrival.filled == arrival.total:
                    return
        except BlockingIOError:
            return
        except (FrameError, OSError) as error:
            self.mesh.link_broke(self, getattr(error, "strerror", None) or str(error))

    def end(self) -> None:
        """End the connection of a peer of this host whose process ends: its bytes are all here."""
        while self.has_unread() and not self.paused:
            self.on_ready(True, False)
        if not self.paused:
            self._ended()

    def has_unread(self) -> bool:
        """Return whether bytes have come that were not read."""
        if self.sock.fileno() < 0:
            return False
        return any(fcntl.ioctl(self.sock, termios.FIONREAD, b"\0" * 4))

    def _ended(self) -> None:
        within = "" if self._decoder.at_boundary else " within a message"
        self.mesh.link_broke(self, f"its connection ended{within}")

    def take(self, data: bytes) -> None:
        """Take bytes that arrived together with the end of the handshake."""
        try:
            while data:
                space = self._decoder.space()
                count = min(len(space), len(data))
                space[:count] = data[:count]
                self._decoder.received(count)
                data = data[count:]
        except FrameError as error:
            self.mesh.link_broke(self, str(error))

    def resume(self) -> None:
        """Read again: a receive was posted, so there may be room for a message that was refused."""
        self.mesh.refused.discard(self.peer)
        if self._owed:
            self._pay(self._arrival)
        if self._decoder.paused:
            self._watch(self._events | READ)
            try:
                self._decoder.received(0)
                if not self.paused:
                    self._tell_room()
            except FrameError as error:
                self.mesh.link_broke(self, str(error))

    def _tell_room(self) -> None:
        """Tell the peer that there is no room for its messages, or that there is again."""
        self.mesh.engine.watchdog.asked(self.peer)

    def message(
        self, header: Header, whole: memoryview | None, *, always: bool = False
    ) -> IncomingMessage | bool:
        """Begin a message's frame (from the decoder); `always`: read it without room, too."""
        matching, arrival, peer = self.mesh.engine.matching, self._arrival, self.peer
        channel = header.channel
        if header.offset:
            if (
                arrival is None
                or arrival.channel != channel
                or arrival.filled != header.offset
                or arrival.total != header.total
            ):
                raise FrameError("a frame that continues no message")
            if always or matching.has_room(arrival, peer, header.length):
                return arrival
            self.mesh.refused.add(peer)
            return False
        if arrival is not None and arrival.filled < arrival.total:
            raise FrameError("a message begins inside another one")
        if not (
            always
            or matching.is_wanted(channel, peer)
            or matching.has_room(None, peer, header.length)
        ):
            self.mesh.refused.add(peer)
            return False
        if whole is not None:
            matching.deliver(channel, peer, whole, header.fingerprint)
            return True
        self._arrival = matching.arriving(channel, peer, header.total, header.fingerprint)
        return self._arrival

    def control(self, header: Header, payload: bytes) -> None:
        """Handle a control frame (from the decoder). Raises `FrameError` if it makes no sense."""
        mesh, peer = self.mesh, self.peer
        engine, group, kind = mesh.engine, header.channel.group, header.channel.kind
        if kind is Kind.CANCEL:
            arrival, self._arrival = self._arrival, None
            if arrival is not None and arrival.filled < arrival.total:
                engine.matching.cancelled(arrival)
                self.resume()  # the memory that it took is free again
        elif kind is Kind.PIECE:
            self._piece_came(header, payload)
        elif kind in MESSAGES:
            message = decode(payload, MESSAGES[kind])
            if isinstance(message, FailureNotice) and mesh.is_own_word(message):
                return
            engine.on_control(peer, group, message)
        elif kind is Kind.LEAVE_GROUP:
            engine.on_control(peer, group, None)
        elif kind is Kind.LEAVE:
            self.left = True
            engine.peer_left(peer)
            if mesh.wide is not None:
                mesh.wide.rank_left(peer)
        elif kind is Kind.NEWS and mesh.wide is not None:
            mesh.wide.came(payload)
        elif kind is not Kind.HEARTBEAT:  # whose arrival is its meaning
            if mesh.rendezvous is None:
                raise FrameError(f"a {kind.name} frame after the rendezvous")
            mesh.rendezvous(peer, kind, payload)

    # Ring buffers ---------------------------------------------------------------------------

    @property
    def ring(self) -> Ring | None:
        """Return the ring buffers to and from the peer, once their memory is attached.

        The peer may use its own as soon as this rank has attached it, before this rank does.
        """
        if self._ring is None and self.mesh.domain is not None:
            self._ring = self.mesh.domain.ring(self.peer)
        return self._ring

    def _piece_came(self, header: Header, payload: bytes) -> None:
        """Read a part of a message from the ring buffer.

        It is read even if there is no room to keep it, one ring buffer full at most; but then it is
        not acknowledged, so the sender waits until there is room again.
        """
        ring = self.ring
        if ring is None:
            raise FrameError("a piece in memory that was never shared")
        frame, piece = ring.came(header, payload)
        arrival = self.message(frame, None, always=True)
        assert not isinstance(arrival, bool)
        arrival.take(piece)
        self._owed += 1
        self._pay(arrival)

    def _pay(self, arrival: IncomingMessage | None) -> None:
        """Acknowledge the pieces that were read, if there is room for more."""
        owed, ring = self._owed, self.ring
        assert ring is not None
        if self.mesh.engine.matching.has_room(arrival, self.peer, MAX_PAYLOAD):
            self._owed = 0
            ring.taken(owed)
        else:
            self.mesh.refused.add(self.peer)
            if owed < ring.pieces:
                return
        if owed == ring.pieces:
            self._tell_room()

    def close(self) -> None:
        """Close the socket; messages in the send queue are dropped."""
        self.mesh.reactor.forget(self.sock)
        self.sock.close()
        if self.out is not None:
            self.out.give_up()
        self._ring = self.out = None  # or its memory would stay mapped


class TlsConnection(Connection):
    """A connection within TLS, whose socket keeps bytes that no selector knows of.

    Bytes that were decrypted, and not read, are read in the next turn of the reactor, as long as
    something is read at all.
    """

    sock: TlsSocket
    _looks = False  # in the next turn

    def __init__(self, mesh: Mesh, peer: int, sock: TlsSocket) -> None:
        super().__init__(mesh, peer, sock)
        self._look_again()

    @override
    def on_ready(self, readable: bool, writable: bool) -> None:
        super().on_ready(readable or self.sock.read_waits, writable)
        self._look_again()

    @override
    def has_unread(self) -> bool:
        return super().has_unread() or (self.sock.fileno() >= 0 and self.sock.pending() > 0)

    @override
    def resume(self) -> None:
        super().resume()
        if self._look_again():
            self.mesh.reactor.wake()  # another thread may sleep there

    def _look_again(self) -> bool:
        """Let the next turn read what TLS has left, if anything; return whether it will."""
        sock = self.sock
        self.mesh.refused.add(self.peer)  # always: TLS may have what was not read for want of room
        if sock.read_waits:
            self._watch(self._events | WRITE)
        if not (self._looks or (sock.pending() and self._events & READ)):
            return False
        if not self._looks:
            self._looks = True
            self.mesh.reactor.call_later(0.0, self._look)
        return True

    def _look(self) -> None:
        self._looks = False
        if self.sock.fileno() >= 0 and self._events & READ:
            self.on_ready(True, False)
