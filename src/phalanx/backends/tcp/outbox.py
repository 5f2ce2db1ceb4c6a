"""An outbox: what waits to go out on one connection, and how it goes."""

from __future__ import annotations

import fcntl
import logging
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable, Iterator

from phalanx.backends.engine.ticket import NOTHING, PostedSend
from phalanx.backends.shm.lane import LARGE, Lane, Part
from phalanx.wire.frame import Channel, Kind, frames, pack_header

log = logging.getLogger("phalanx")

END: Part = (b"", NOTHING, 0)  # there are no more parts
SMALL = 16 << 10  # bytes of a message that is copied rather than queued


class Outgoing:
    """A message on its way out, cut into frames."""

    __slots__ = ("begun", "frames", "last_begun", "send")

    def __init__(self, send: PostedSend, lane: Lane | None) -> None:
        self.send: PostedSend | None = send  # None once nobody waits for it
        self.frames: Iterator[Part | None] = lane.parts(send) if lane is not None else _parts(send)
        self.begun = 0  # bytes in the frames that have begun
        self.last_begun = False  # whether the last one has


def _parts(send: PostedSend) -> Iterator[Part]:
    operation = send.ticket.operation
    for header, payload in frames(operation.channel, send.view, operation.fingerprint):
        yield header, payload, len(payload)


class Outbox:
    """Messages and control frames for one peer, on their way to a non-blocking socket.

    Messages go out in the order of `send`; control frames go before them, at the next boundary of a
    frame. All methods are called with the engine's lock held.

    lane         where large messages go, on one host
    wants_room   called with True when the socket takes no more, with False when it has taken all
    """

    def __init__(self, peer: int, sock: socket.socket, wants_room: Callable[[bool], None]) -> None:
        self.lane: Lane | None = None
        self._peer = peer
        self._sock = sock
        self._wants_room = wants_room
        self._outbox: deque[Outgoing] = deque()
        self._control: deque[bytes] = deque()
        self._pieces: list[memoryview] = []  # what is left of the frame that is being written

    def send(self, send: PostedSend) -> None:
        """Put a message in the queue, and write what can be written."""
        size = len(send.view)
        if size > SMALL or not self.idle or not self._sent_at_once(send):
            self._outbox.append(Outgoing(send, self.lane if size >= LARGE else None))
            self.flush()

    def _sent_at_once(self, send: PostedSend) -> bool:
        """Whether the socket takes a small message, as it nearly always does."""
        operation = send.ticket.operation
        size = len(send.view)
        header = pack_header(
            operation.channel, fingerprint=operation.fingerprint, length=size, total=size
        )
        message = header + send.view
        try:
            written = self._sock.send(message)
        except OSError:  # which `flush` will meet, too
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

    def retract(self, send: PostedSend) -> None:
        """Give up a message. If it has begun, finish its frame from a copy and say so."""
        for place, outgoing in enumerate(self._outbox):
            if outgoing.send is not send:
                continue
            del self._outbox[place]
            if place == 0 and self._pieces:
                self._finish_from_copy(outgoing)
                self._outbox.appendleft(outgoing)
            if place == 0:
                self._cancel(send)
            return

    def settle(self, send: PostedSend) -> bool:
        """Whether a message that would be given up counts as sent: its last frame has begun.

        The peer gets it whole in any case; what is left of the frame is written from a copy.
        """
        if not self._outbox or self._outbox[0].send is not send or not self._outbox[0].last_begun:
            return False
        self._finish_from_copy(self._outbox[0])
        send.complete()
        return True

    def _finish_from_copy(self, outgoing: Outgoing) -> None:
        """Nobody waits for this message any more: write its frame to the end, and no other."""
        self._pieces = [memoryview(bytes(piece)) for piece in self._pieces]
        outgoing.send = None
        outgoing.frames = iter(())

    def _cancel(self, send: PostedSend) -> None:
        channel = send.ticket.operation.channel
        header = pack_header(Channel(channel.group, Kind.CANCEL, channel.number))
        self._control.append(header)
        self.flush()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to write."""
        return not (self._pieces or self._outbox or self._control)

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
            self._wants_room(True)
        except OSError as error:
            # What the peer has sent before is still to be read; that ends the link.
            log.debug("writing to rank %d failed: %s", self._peer, error)
            self._outbox.clear()
            self._control.clear()
            self._pieces = []
            self._wants_room(False)
        else:
            self._wants_room(False)

    def _next_frame(self) -> bool:
        """Take the next frame to write; False if there is none."""
        if self._control:
            self._pieces = [memoryview(self._control.popleft())]
            return True
        while self._outbox:
            outgoing = self._outbox[0]
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
            self._outbox.popleft()
            if outgoing.send is not None:
                outgoing.send.complete()
        return False

    def _stall(self) -> None:
        """The lane is full: go on when it is not, unless something comes to be said first."""
        assert self.lane is not None
        self.lane.when_free(self.flush)

    def _written(self, count: int) -> None:
        pieces = self._pieces
        while pieces and count >= len(pieces[0]):
            count -= len(pieces[0])
            del pieces[0]
        if count:
            pieces[0] = pieces[0][count:]

    def close(self) -> None:
        """What waited to go out is gone."""
        if self.lane is not None:
            self.lane.give_up()
