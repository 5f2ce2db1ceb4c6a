"""Frames: how messages lie in a stream of bytes. Sans-IO: nothing here reads or writes a socket.

A message is cut into frames of at most `MAX_PAYLOAD` bytes, so that a failure notice never waits
behind a large tensor. Every frame is a fixed little-endian header and its payload:

     0      4  5  6   8      12          20          28            36         44          52
    +------+--+--+---+------+-----------+-----------+-------------+----------+-----------+-------
    | PHLX |v |k |0 0|length|   group   |  number   | fingerprint |  total   |  offset   | payload
    +------+--+--+---+------+-----------+-----------+-------------+----------+-----------+-------

    v            version of this layout
    k            kind of frame, see `Kind`
    length       bytes of payload in this frame
    group        which group of ranks
    number       collective: its sequence number in the group; point-to-point: its tag
    fingerprint  hash of the operation, the same on every participating rank
    total        bytes of the whole message
    offset       where in the message this payload belongs

No length is believed: a payload longer than `MAX_PAYLOAD`, or one that exceeds its message, is a
`FrameError` before any memory is allocated for it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

MAGIC = b"PHLX"
VERSION = 2
MAX_PAYLOAD = 4 << 20
MAX_CONTROL = 1 << 20
STAGING = 64 << 10
ALIGNED = 16  # bytes, enough for elements of every dtype

_HEADER = struct.Struct("<4sBBHIQqQQQ")
HEADER_SIZE = _HEADER.size
_FIRST = -HEADER_SIZE % ALIGNED  # place of a staged header, so that its payload is aligned


class FrameError(Exception):
    """The bytes received are not frames: another program, another version, or damage."""


class Kind(enum.IntEnum):
    """The subject of a frame. Kinds from `CANCEL` on are control frames: one frame each."""

    COLLECTIVE = 1  # part of a message of a collective
    POINT_TO_POINT = 2  # part of a message that a user's send() sent
    CANCEL = 3  # the message that was under way on this connection will not be completed
    FAILURE = 4  # a group is broken, and why
    LEAVE = 5  # the sender closes, in good order
    LEAVE_GROUP = 6  # the sender closes one group
    ADDRESS = 7  # to rank 0: my address
    TABLE = 8  # from rank 0: all addresses
    ASK = 9  # are you in this operation, too, and what do you wait for?
    ANSWER = 10  # my wait
    HEARTBEAT = 11  # I am here
    MEMORY = 12  # I have attached the memory of the ranks of my host; or why I have not
    PIECE = 13  # a part of a message lies in memory that you have attached
    NEWS = 14  # news for every rank, passed on from rank to rank


_KINDS = {int(kind): kind for kind in Kind}


class Channel(NamedTuple):
    """Messages between two ranks on one channel arrive in the order sent; channels never mix."""

    group: int
    kind: Kind
    number: int


class Header(NamedTuple):
    """The decoded header of one frame."""

    channel: Channel
    fingerprint: int
    length: int
    total: int
    offset: int


def pack_header(
    channel: Channel, *, fingerprint: int = 0, length: int = 0, total: int = 0, offset: int = 0
) -> bytes:
    """Return the 52 bytes before a payload of `length` bytes."""
    group, kind, number = channel
    return _HEADER.pack(MAGIC, VERSION, kind, 0, length, group, number, fingerprint, total, offset)


def unpack_header(data: bytes | bytearray | memoryview, position: int = 0) -> Header:
    """Return the header at `position`. Raise `FrameError` for anything that cannot be one."""
    magic, version, kind, zero, length, group, number, fingerprint, total, offset = (
        _HEADER.unpack_from(data, position)
    )
    if magic != MAGIC:
        raise FrameError(f"expected a frame that begins with {MAGIC!r}, got {bytes(magic)!r}")
    if version != VERSION:
        raise FrameError(f"the peer speaks frame version {version}, this rank {VERSION}")
    known = _KINDS.get(kind)
    if known is None or zero != 0:
        raise FrameError(f"a frame of unknown kind {kind} (flags {zero})")
    limit = MAX_CONTROL if known >= Kind.CANCEL else MAX_PAYLOAD
    if length > limit:
        raise FrameError(f"a frame announces {length} bytes, more than the limit of {limit}")
    if offset + length > total:
        raise FrameError(
            f"a frame of {length} bytes at {offset} leaves its message of {total} bytes"
        )
    return Header(Channel(group, known, number), fingerprint, length, total, offset)


class Sink(Protocol):
    """The memory for one message's payload, filled piece by piece, in order."""

    def space(self) -> memoryview:
        """Return room for the next bytes; never empty before the message is complete."""
        ...

    def advance(self, count: int) -> None:
        """Count `count` bytes as written at the start of `space()`."""
        ...


class FrameReceiver(Protocol):
    """The receiver of a `FrameDecoder`'s frames."""

    def message(self, header: Header, whole: memoryview | None) -> Sink | bool:
        """Return the sink of a frame that begins, or False to be asked again later.

        whole   the message, if it is here in one piece; memory valid for this call. Then the answer
                may be True: it is taken
        """
        ...

    def control(self, header: Header, payload: bytes) -> None:
        """Take a whole control frame."""
        ...


class FrameDecoder:
    """Turns a stream of bytes into frames.

    The driver reads into `space()` and reports the bytes with `received(count)`, which raises
    `FrameError` once: the stream ends there. Headers and small messages pass through a small
    staging buffer, many at a time; the bulk of a large message is read into its sink's own memory,
    so that it is never copied here.

    paused        a message was refused: `received(0)` asks again
    at_boundary   whether the stream may end here without cutting a frame in two
    """

    def __init__(self, receiver: FrameReceiver) -> None:
        self.paused = False
        self.at_boundary = True
        self._receiver = receiver
        self._staging = memoryview(bytearray(STAGING))
        self._begin = self._end = 0  # staged bytes not yet used: [_begin, _end)
        self._sink: Sink | None = None  # place of the next bytes, if not the staging buffer,
        self._left = 0  # and how many are to come of its frame
        frames = self._read_frames()
        next(frames)
        self.received: Callable[[int], object] = frames.send

    def space(self) -> memoryview:
        """Return the memory for the next bytes. Empty only while `paused`."""
        if self._sink is not None:
            return self._sink.space()[: self._left]
        if self._begin == self._end:
            self._begin = self._end = _FIRST
        elif self._end == STAGING:
            kept = bytes(self._staging[self._begin :])
            self._begin, self._end = 0, len(kept)
            self._staging[: len(kept)] = kept
        return self._staging[self._end :]

    def _read_frames(self) -> Generator[None, int, None]:
        """Read all frames, one after the other. Yield for bytes, and receive how many came."""
        receiver, staging = self._receiver, self._staging
        while True:
            while self.paused or self._end - self._begin < HEADER_SIZE:
                self.at_boundary = self._begin == self._end
                count = yield
                self._end += count
                self.paused = False
            self.at_boundary = False
            header = unpack_header(staging, self._begin)
            first = self._begin + HEADER_SIZE
            stop = first + header.length
            if header.channel.kind >= Kind.CANCEL:
                self._begin = first
                payload = bytearray()  # grows as it comes
                while len(payload) < header.length:
                    while self._begin == self._end:
                        count = yield
                        self._end += count
                    stop = min(self._begin + header.length - len(payload), self._end)
                    payload += staging[self._begin : stop]
                    self._begin = stop
                receiver.control(header, bytes(payload))
                continue
            is_whole = header.length == header.total and stop <= self._end
            whole = staging[first:stop] if is_whole and not first % ALIGNED else None
            taken = receiver.message(header, whole)
            if taken is False:
                self.paused = True
            elif taken is True:
                self._begin = stop
            else:
                self._begin = first
                yield from self._fill(taken, header.length)

    def _fill(self, sink: Sink, left: int) -> Generator[None, int, None]:
        """Move the payload of a frame to its sink: first the staged bytes, then those that come."""
        while left:
            staged = min(left, self._end - self._begin)
            if staged:
                room = sink.space()[:staged]
                count = len(room)
                room[:] = self._staging[self._begin : self._begin + count]
                self._begin += count
            else:
                self._sink, self._left = sink, left
                count = yield
                self._sink = None
            left -= count
            if count:
                sink.advance(count)
