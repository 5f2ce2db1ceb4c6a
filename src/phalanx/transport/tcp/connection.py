"""The open connection to one peer: frames in, and a send queue."""

from __future__ import annotations

import fcntl
import logging
import socket
import sys
import termios
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

from phalanx.core.engine import Engine
from phalanx.core.matching import IncomingMessage
from phalanx.core.posted import PostedSend
from phalanx.core.steps import NOTHING
from phalanx.transport.shm.domain import PIECES, HostDomain
from phalanx.transport.shm.queue import LARGE, Part, RingBuffer
from phalanx.transport.tcp.loop import Reactor
from phalanx.wire.frame import (
    MAX_PAYLOAD,
    Channel,
    FrameDecoder,
    FrameError,
    Header,
    Kind,
    frames,
    pack_header,
)
from phalanx.wire.handshake import Identity

READS_AT_A_TIME = 8  # then other connections are read


class MeshBase(ABC):
    """The mesh (mesh.py), as far as its connections know it.

    domain           what this rank shares with others of its host, if anything
    last_rejection   who was turned away last, and why; for errors
    """

    engine: Engine
    reactor: Reactor
    identity: Identity
    token: bytes
    loopback_only: bool
    connections: dict[int, Connection]
    domain: HostDomain | None
    last_rejection: str

    @property
    def rank(self) -> int:
        """This rank."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.identity.world_size

    @abstractmethod
    def control_came(self, connection: Connection, header: Header, payload: bytes) -> None:
        """A control frame came from a peer. Raises `FrameError` for one that makes no sense."""

    @abstractmethod
    def admit(self, peer: int) -> str | None:
        """Why a peer is rejected although it is authenticated, or None."""

    @abstractmethod
    def turned_away(self, what: str) -> None:
        """A caller was rejected."""

    @abstractmethod
    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        """A peer is authenticated: messages can flow."""

    @abstractmethod
    def link_ended(self, connection: Connection, *, clean: bool) -> None:
        """The peer has closed its side."""

    @abstractmethod
    def link_broke(self, connection: Connection, reason: str) -> None:
        """The connection to a peer has failed."""

    @abstractmethod
    def give_up(self, connection: Connection, reason: str) -> None:
        """A peer gives no sign of life: it counts as lost, and is told so if it comes back."""


class Connection:
    """Frames to and from one peer, over a non-blocking socket.

    send queue   what waits to go out

    All methods are called with the engine's lock held.
    """

    def __init__(self, mesh: MeshBase, peer: int, sock: socket.socket) -> None:
        self.mesh = mesh
        self.peer = peer
        self.sock = sock
        self.left = False  # the peer has said that it closes
        self.heard = False  # whether a byte has arrived since this was last set to False
        self.given_up = False  # the peer counts as lost, though the connection is there
        self._decoder = FrameDecoder(self)
        self._arrival: IncomingMessage | None = None
        self._owed = 0  # pieces of the peer's ring buffer that were read but not acknowledged
        self._watched = (False, False)  # for reading, for writing
        self._ring: RingBuffer | None = None
        self.send_queue = SendQueue(peer, sock, self._wants_room)
        self._watch(read=True)

    # Out ------------------------------------------------------------------------------------

    def send_control(self, kind: Kind, payload: bytes = b"", group: int = 0) -> None:
        """Put a control frame before the messages that have not begun."""
        self.send_queue.send_control(kind, payload, group)

    def _wants_room(self, wanted: bool) -> None:
        self._watch(write=wanted)

    def _watch(self, *, read: bool | None = None, write: bool | None = None) -> None:
        wanted = (
            self._watched[0] if read is None else read,
            self._watched[1] if write is None else write,
        )
        if wanted != self._watched:
            self._watched = wanted
            self.mesh.reactor.watch(self.sock, self.on_ready, read=wanted[0], write=wanted[1])

    # In -------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether nothing is read from the peer, since there is no room for what it sends."""
        return self._decoder.paused

    @property
    def held_back(self) -> bool:
        """Whether the peer waits for room, on the connection or in its ring buffer."""
        return self._owed > 0 or self._decoder.paused

    def on_ready(self, readable: bool, writable: bool) -> None:
        """The socket can be read from, or written to."""
        if writable:
            self.send_queue.flush()
        if readable:
            self.read()

    def read(self) -> None:
        """Read what has arrived."""
        try:
            for _ in range(READS_AT_A_TIME):
                space = self._decoder.space()
                if not len(space):
                    self._watch(read=False)
                    self._tell_room()
                    return
                count = self.sock.recv_into(space)
                if count == 0:
                    self.mesh.link_ended(self, clean=self._decoder.at_boundary)
                    return
                self.heard = True
                self._decoder.received(count)
                if count < len(space) or not self._is_wanted:
                    return
        except BlockingIOError:
            return
        except FrameError as error:
            self.mesh.link_broke(self, str(error))
        except OSError as error:
            self.mesh.link_broke(self, error.strerror or str(error))

    @property
    def _is_wanted(self) -> bool:
        """Whether the bytes that come next belong to a posted receive.

        If not, they are left in the socket: the rank that has received its message posts the next
        receive first, so fewer messages are unexpected and have to be copied.
        """
        arrival = self._arrival
        return arrival is not None and arrival.filled < arrival.total and not arrival.kept

    def take(self, data: bytes) -> None:
        """Bytes that arrived together with the end of the handshake."""
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
        """A receive was posted: there may be room now for the message that was refused."""
        self._pay(self._arrival)
        if self._decoder.paused:
            self._watch(read=True)
            try:
                if self._decoder.resume():
                    self._tell_room()
            except FrameError as error:
                self.mesh.link_broke(self, str(error))

    def _tell_room(self) -> None:
        """Tell the peer that there is no room for what it sends, or that there is again."""
        self.mesh.engine.watchdog.asked(self.peer)

    def message(self, header: Header) -> IncomingMessage | None:
        """A frame of a message begins (from the decoder)."""
        matching = self.mesh.engine.matching
        channel = header.channel
        if header.offset == 0:
            if not self._may_begin(header):
                return None
            self._arrival = matching.arriving(channel, self.peer, header.total, header.fingerprint)
            return self._arrival
        arrival = self._continued(header)
        return arrival if matching.has_room(arrival, self.peer, header.length) else None

    def _continued(self, header: Header) -> IncomingMessage:
        """The message that this frame goes on with."""
        arrival = self._arrival
        if (
            arrival is None
            or arrival.channel != header.channel
            or arrival.filled != header.offset
            or arrival.total != header.total
        ):
            raise FrameError("a frame that continues no message")
        return arrival

    def whole(self, header: Header, payload: memoryview) -> bool:
        """A message came in one piece (from the decoder)."""
        if not self._may_begin(header):
            return False
        matching = self.mesh.engine.matching
        matching.deliver(header.channel, self.peer, payload, header.fingerprint)
        return True

    def _may_begin(self, header: Header) -> bool:
        """Whether there is room for the message that begins with this frame."""
        self._check_last_is_whole()
        matching = self.mesh.engine.matching
        return matching.is_wanted(header.channel, self.peer) or matching.has_room(
            None, self.peer, header.length
        )

    def _check_last_is_whole(self) -> None:
        arrival = self._arrival
        if arrival is not None and arrival.filled < arrival.total:
            raise FrameError("a message begins inside another one")

    def control(self, header: Header, payload: bytes) -> None:
        """A control frame came (from the decoder)."""
        if header.channel.kind is Kind.CANCEL:
            arrival, self._arrival = self._arrival, None
            if arrival is not None and arrival.filled < arrival.total:
                self.mesh.engine.matching.cancelled(arrival)
        elif header.channel.kind is Kind.PIECE:
            self._piece_came(header, payload)
        else:
            self.mesh.control_came(self, header, payload)

    def _piece_came(self, header: Header, payload: bytes) -> None:
        """A part of a message lies in the ring buffer.

        It is read even if there is no room to keep it, one ring buffer full at most; but then it is
        not acknowledged, so the sender waits until there is room again.
        """
        ring = self.ring
        if ring is None:
            raise FrameError("a piece in memory that was never shared")
        whole, piece = ring.came(header, payload)
        matching = self.mesh.engine.matching
        if whole.offset == 0:
            self._check_last_is_whole()
            self._arrival = matching.arriving(
                whole.channel, self.peer, whole.total, whole.fingerprint
            )
        arrival = self._continued(whole) if whole.offset else self._arrival
        assert arrival is not None
        arrival.take(piece)
        self._owed += 1
        self._pay(arrival)

    @property
    def ring(self) -> RingBuffer | None:
        """The ring buffers to and from the peer, once their memory is attached.

        The peer may use its own as soon as this rank has attached it, before this rank does.
        """
        domain = self.mesh.domain
        if self._ring is None and domain is not None and self.peer in domain.local_peers:
            self._ring = RingBuffer(domain, self.peer)
        return self._ring

    def _pay(self, arrival: IncomingMessage | None) -> None:
        """Acknowledge the pieces that were read, if there is room for more."""
        ring = self.ring
        if not self._owed or ring is None:
            return
        if self.mesh.engine.matching.has_room(arrival, self.peer, MAX_PAYLOAD):
            owed, self._owed = self._owed, 0
            ring.taken(owed)
            if owed == PIECES:
                self._tell_room()
        elif self._owed == PIECES:
            self._tell_room()

    # The end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket; messages in the send queue are dropped."""
        self.mesh.reactor.forget(self.sock)
        self.sock.close()
        self.send_queue.close()
        self._ring = self.send_queue.ring = None  # or its memory would stay mapped


# ------------------------------------------------------------------------------
# The send queue of one connection.

log = logging.getLogger("phalanx")

END: Part = (b"", NOTHING, 0)  # there are no more parts
SMALL = 16 << 10  # bytes of a message that is copied rather than queued


class Outgoing:
    """A message in the send queue, cut into frames."""

    __slots__ = ("begun", "frames", "last_begun", "send")

    def __init__(self, send: PostedSend, ring: RingBuffer | None) -> None:
        self.send: PostedSend | None = send  # None once it was given up
        self.frames: Iterator[Part | None] = ring.parts(send) if ring is not None else _parts(send)
        self.begun = 0  # bytes in the frames that have begun
        self.last_begun = False  # whether the last one has


def _parts(send: PostedSend) -> Iterator[Part]:
    work = send.work
    for header, payload in frames(work.channel, send.view, work.call.fingerprint):
        yield header, payload, len(payload)


class SendQueue:
    """Messages and control frames for one peer, written to a non-blocking socket.

    Messages go out in the order of `send`; control frames go before them, at the next boundary of a
    frame. All methods are called with the engine's lock held.

    ring buffer         where large messages go, on one host
    wants_room   called with True when the socket takes no more, with False when it has taken all
    """

    def __init__(self, peer: int, sock: socket.socket, wants_room: Callable[[bool], None]) -> None:
        self.ring: RingBuffer | None = None
        self._peer = peer
        self._sock = sock
        self._wants_room = wants_room
        self._queue: deque[Outgoing] = deque()
        self._control: deque[bytes] = deque()
        self._pieces: list[memoryview] = []  # what is left of the frame that is being written
        self._waiting = False  # whether the socket took no more

    def send(self, send: PostedSend) -> None:
        """Put a message in the queue, and write what can be written."""
        size = len(send.view)
        if size > SMALL or not self.idle or not self._sent_at_once(send):
            self._queue.append(Outgoing(send, self.ring if size >= LARGE else None))
            self.flush()

    def _sent_at_once(self, send: PostedSend) -> bool:
        """Write a small message at once; whether the socket took it, as it nearly always does."""
        work, size = send.work, len(send.view)
        header = pack_header(
            work.channel, fingerprint=work.call.fingerprint, length=size, total=size
        )
        message = header + send.view
        try:
            written = self._sock.send(message)
        except OSError:  # `flush` handles it
            return False
        send.complete()
        if written < len(message):
            self._pieces = [memoryview(message)[written:]]
            self.flush()
        return True

    def send_control(self, kind: Kind, payload: bytes = b"", group: int = 0) -> None:
        """Put a control frame before the messages that have not begun."""
        size = len(payload)
        header = pack_header(Channel(group, kind, 0), length=size, total=size)
        self._control.append(header + payload)
        self.flush()

    def cancel(self, send: PostedSend) -> None:
        """Give up a message. If it has begun, finish its frame from a copy and send CANCEL."""
        for place, outgoing in enumerate(self._queue):
            if outgoing.send is not send:
                continue
            del self._queue[place]
            if place == 0 and self._pieces:
                self._finish_from_copy(outgoing)
                self._queue.appendleft(outgoing)
            if place == 0:
                self._cancel(send)
            return

    def settle(self, send: PostedSend) -> bool:
        """Whether a message that would be given up counts as sent: its last frame has begun.

        The peer gets it whole in any case; what is left of the frame is written from a copy.
        """
        if not self._queue or self._queue[0].send is not send or not self._queue[0].last_begun:
            return False
        self._finish_from_copy(self._queue[0])
        send.complete()
        return True

    def _finish_from_copy(self, outgoing: Outgoing) -> None:
        """The message was given up: write its current frame to the end, and no other."""
        self._pieces = [memoryview(bytes(piece)) for piece in self._pieces]
        outgoing.send = None
        outgoing.frames = iter(())

    def _cancel(self, send: PostedSend) -> None:
        channel = send.work.channel
        header = pack_header(Channel(channel.group, Kind.CANCEL, channel.number))
        self._control.append(header)
        self.flush()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to write."""
        return not (self._pieces or self._queue or self._control)

    def all_sent(self) -> bool:
        """Whether the peer's kernel has acknowledged every byte (where that can be known)."""
        if not self.idle:
            return False
        try:
            unsent = fcntl.ioctl(self._sock, termios.TIOCOUTQ, b"\0" * 4)
        except OSError:
            return True
        return int.from_bytes(unsent, sys.byteorder) == 0

    def flush(self) -> None:
        """Write as much as the socket takes."""
        try:
            while self._pieces or self._next_frame():
                written = self._sock.sendmsg(self._pieces)
                self._written(written)
        except BlockingIOError:
            self._waiting = True
            self._wants_room(True)
            return
        except OSError as error:
            # The peer's last bytes are still to be read; the read then ends the connection.
            log.debug("writing to rank %d failed: %s", self._peer, error)
            self._queue.clear()
            self._control.clear()
            self._pieces = []
        if self._waiting:
            self._waiting = False
            self._wants_room(False)

    def _next_frame(self) -> bool:
        """Take the next frame to write; False if there is none."""
        if self._control:
            self._pieces = [memoryview(self._control.popleft())]
            return True
        while self._queue:
            outgoing = self._queue[0]
            part = next(outgoing.frames, END)
            if part is None:
                self._stall()
                return False
            if part is not END:
                header, payload, count = part
                outgoing.begun += count
                assert outgoing.send is not None
                outgoing.last_begun = outgoing.begun == len(outgoing.send.view)
                self._pieces = [memoryview(header)]
                if len(payload):
                    self._pieces.append(payload)
                return True
            self._queue.popleft()
            if outgoing.send is not None:
                outgoing.send.complete()
        return False

    def _stall(self) -> None:
        """The ring buffer is full: go on when it has room. Control frames may go first."""
        assert self.ring is not None
        self.ring.when_free(self.flush)

    def _written(self, count: int) -> None:
        pieces = self._pieces
        while pieces and count >= len(pieces[0]):
            count -= len(pieces[0])
            del pieces[0]
        if count:
            pieces[0] = pieces[0][count:]

    def close(self) -> None:
        """Drop what is queued."""
        if self.ring is not None:
            self.ring.give_up()
