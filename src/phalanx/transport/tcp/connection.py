"""A connection: frames in, frames out; and a connection within TLS."""

from __future__ import annotations

import fcntl
import logging
import socket
import sys
import termios
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from typing_extensions import override

from phalanx.core.matching import IncomingMessage
from phalanx.core.posted import PostedSend
from phalanx.core.transport import Ring
from phalanx.transport.tcp.loop import READ, WRITE
from phalanx.transport.tcp.send_buffer import SendBuffer
from phalanx.transport.tcp.tls import TlsSocket
from phalanx.wire.control import Answer, Ask, FailureNotice, decode
from phalanx.wire.frame import (
    MAX_PAYLOAD,
    Channel,
    FrameDecoder,
    FrameError,
    Header,
    Kind,
    pack_header,
)

if TYPE_CHECKING:
    from phalanx.transport.tcp.mesh import Mesh

log = logging.getLogger("phalanx")

SMALL = 16 << 10  # bytes of a message that is copied rather than queued
READS_AT_A_TIME = 8  # then other connections are read
NONE = -1  # no frame of a message has begun
MESSAGES: Mapping[Kind, type[FailureNotice | Ask | Answer]] = MappingProxyType(
    {Kind.FAILURE: FailureNotice, Kind.ASK: Ask, Kind.ANSWER: Answer}
)


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
        self._buffer = SendBuffer(sock)
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
            if self.mesh.crowding is not None:
                self._buffer.fit(self.mesh.crowding, self.mesh.engine.now())
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
