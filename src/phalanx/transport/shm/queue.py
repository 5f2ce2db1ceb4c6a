"""A ring buffer: memory through which the large messages of one rank go to a local peer.

    sender                                                      receiver
    copies a piece into the ring buffer
    says so on the connection: PIECE   -------------------->    copies it to where it belongs,
                                                                or combines it right from there
    uses that part of the ring buffer again   <- a count in memory -   counts it as taken

PIECE frames go over the connection, in order with all other messages, so messages never overtake
each other. A sender waits while its ring buffer is full, as it does while its socket is. The
contents of the ring buffer outlive the sender, since the receiver has the memory mapped.

Each rank has a ring buffer to every rank of the job at a fixed place of its first segment, behind
the directory; memory is only taken for those that are used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from phalanx.core.posted import PostedSend
from phalanx.core.steps import NOTHING
from phalanx.transport.shm.domain import PIECE, PIECES, RING_HEAD, RING_SIZE, SIZE, HostDomain
from phalanx.transport.shm.segments import WEAK_ORDER
from phalanx.wire.frame import Channel, FrameError, Header, Kind, pack_header

LARGE = 64 << 10  # bytes of a message from which on it goes through a ring buffer

_PIECE = struct.Struct("<BQQQI")  # kind, fingerprint, total, offset, length
Part = tuple[bytes, memoryview, int]  # header, payload, and the message's bytes that they stand for


class RingBuffer:
    """One rank's, to one local peer, and the local peer's to it."""

    def __init__(self, domain: HostDomain, peer: int) -> None:
        local_peer = domain.local_peers[peer]
        mine, theirs = domain.directory.segment, local_peer.directory.segment(0)
        there, here = SIZE + peer * RING_SIZE, SIZE + domain.rank * RING_SIZE
        self._domain = domain
        self._peer = local_peer
        self._out = memoryview(mine.map)[there + RING_HEAD : there + RING_SIZE]
        self._in = memoryview(theirs.map)[here + RING_HEAD : here + RING_SIZE]
        self._taken_here = mine.words[there // 8 : there // 8 + 1]
        self._taken_there = theirs.words[here // 8 : here // 8 + 1]
        self._sent = self._received = 0

    def is_full(self) -> bool:
        """Whether the local peer has to read a piece before more can be sent."""
        return self._sent - self._taken_there[0] >= PIECES

    def parts(self, send: PostedSend) -> Iterator[Part | None]:
        """A message, piece by piece; None while there is no room."""
        work = send.work
        group, kind, number = work.channel
        view, total = send.view, len(send.view)
        channel = Channel(group, Kind.PIECE, number)
        for offset in range(0, total, PIECE):
            while self.is_full():
                yield None
            piece = view[offset : offset + PIECE]
            start = self._sent % PIECES * PIECE
            self._out[start : start + len(piece)] = piece
            self._sent += 1
            if WEAK_ORDER:
                self._domain.fence()
            what = _PIECE.pack(kind, work.call.fingerprint, total, offset, len(piece))
            header = pack_header(channel, length=len(what), total=len(what))
            yield header + what, NOTHING, len(piece)

    def came(self, header: Header, payload: bytes) -> tuple[Header, memoryview]:
        """A PIECE frame has come: the header of the message's part, and its bytes in the buffer.

        Raises `FrameError` for an invalid one.
        """
        try:
            kind, fingerprint, total, offset, length = _PIECE.unpack(payload)
            channel = Channel(header.channel.group, Kind(kind), header.channel.number)
        except (struct.error, ValueError):
            raise FrameError("a piece of a message that cannot be read") from None
        if kind not in (Kind.COLLECTIVE, Kind.POINT_TO_POINT) or not (
            0 < length <= PIECE and offset + length <= total
        ):
            raise FrameError(f"a piece of {length} bytes at {offset} of a message of {total}")
        start = self._received % PIECES * PIECE
        self._received += 1
        return Header(channel, fingerprint, length, total, offset), self._in[start : start + length]

    def taken(self, count: int) -> None:
        """The oldest pieces have been read; the local peer may use their memory again."""
        self._taken_here[0] += count
        self._domain.fence()
        self._peer.wake()

    def when_free(self, go_on: Callable[[], None]) -> None:
        """It is full: call `go_on` when it is not."""
        self._domain.stalled[self.is_full] = go_on
        self._domain.begins_to_wait()

    def give_up(self) -> None:
        """Nothing more is to be sent."""
        self._domain.stalled.pop(self.is_full, None)
