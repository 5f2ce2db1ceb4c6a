"""Ring buffers: memory through which the large messages of one rank go to a local peer.

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
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.core.posted import PostedSend
from phalanx.transport.shm.directory import ASLEEP, SIZE, WEAK_ORDER, LocalPeer
from phalanx.wire.frame import Channel, FrameError, Header, Kind, pack_header

if TYPE_CHECKING:
    from phalanx.transport.shm.domain import HostDomain

LARGE = 64 << 10  # bytes of a message from which on it goes through a ring buffer
PIECE = 512 << 10  # bytes
PIECES = 4
RING_HEAD = 4096  # bytes; word 0: how many pieces of the opposite ring buffer this rank has taken
RING_SIZE = RING_HEAD + PIECES * PIECE

_PIECE = struct.Struct("<BQQQI")  # kind, fingerprint, total, offset, length


class RingBuffer:
    """One rank's ring buffer to one local peer, and the local peer's to it."""

    least, piece, pieces = LARGE, PIECE, PIECES

    def __init__(self, domain: HostDomain, local_peer: LocalPeer) -> None:
        mine, theirs = domain.directory.segment, local_peer[0]
        there, here = SIZE + local_peer.rank * RING_SIZE, SIZE + domain.rank * RING_SIZE
        self._domain = domain
        self._peer = local_peer
        self._out = memoryview(mine.map)[there + RING_HEAD : there + RING_SIZE]
        self._in = memoryview(theirs.map)[here + RING_HEAD : here + RING_SIZE]
        self._taken_here = mine.words[there // 8 : there // 8 + 1]
        self._taken_there = theirs.words[here // 8 : here // 8 + 1]
        self._sent = self._received = 0

    def is_full(self) -> bool:
        """Return whether the local peer has to read a piece before more can be sent."""
        return self._sent - self._taken_there[0] >= PIECES

    def put(self, send: PostedSend, offset: int) -> bytes | None:
        """Put a message's next piece in. Return its frame, or None while there is no room."""
        if self.is_full():
            return None
        group, kind, number = send.work.channel
        piece = send.view[offset : offset + PIECE]
        start = self._sent % PIECES * PIECE
        self._out[start : start + len(piece)] = piece
        self._sent += 1
        if WEAK_ORDER:
            self._domain.fence()
        fingerprint = send.work.call.fingerprint
        what = _PIECE.pack(kind, fingerprint, len(send.view), offset, len(piece))
        channel = Channel(group, Kind.PIECE, number)
        return pack_header(channel, length=len(what), total=len(what)) + what

    def came(self, header: Header, payload: bytes) -> tuple[Header, memoryview]:
        """Take a PIECE frame. Return the header of the message's part, and its bytes in the buffer.

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
        """Free the oldest pieces, which were read: the local peer may use their memory again."""
        self._taken_here[0] += count
        self._domain.fence()
        if self._peer.words[ASLEEP]:
            self._peer.wake()

    def when_free(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when it has room; it is full now."""
        self._domain.stalled[self] = go_on
        self._domain.begins_to_wait()

    def give_up(self) -> None:
        """Cancel `when_free`: nothing more is to be sent."""
        self._domain.stalled.pop(self, None)
