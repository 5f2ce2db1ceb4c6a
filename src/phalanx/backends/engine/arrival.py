"""A message on its way in: where its bytes go, as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.backends.engine.ticket import PostedReceive
from phalanx.wire.frame import Channel

if TYPE_CHECKING:
    from phalanx.backends.engine.mailbox import Mailbox

BLOCK = 256 << 10  # bytes combined at a time while a message arrives; fits the second-level cache


class Arrival:
    """A message that is arriving, and where its bytes go.

    wanted, not combined    straight into the receiver's memory
    wanted, combined        into a block; when that is full, it is reduced into the memory
    not wanted yet          into chunks, taken as the bytes come
    not wanted any more     nowhere
    """

    __slots__ = (
        "_block",
        "_chunk_left",
        "_chunks",
        "_staged",
        "channel",
        "filled",
        "fingerprint",
        "kept",
        "mailbox",
        "order",
        "peer",
        "posted",
        "total",
    )

    def __init__(
        self, mailbox: Mailbox, channel: Channel, peer: int, total: int, fingerprint: int
    ) -> None:
        self.mailbox = mailbox
        self.channel = channel
        self.peer = peer
        self.total = total
        self.fingerprint = fingerprint
        self.filled = 0
        self.posted: PostedReceive | None = None
        self.kept = False  # nobody has asked for it yet
        self.order = 0  # among the messages that are kept
        self._chunks: list[memoryview] = []
        self._chunk_left = 0  # free bytes at the end of the last chunk
        self._block: memoryview | None = None  # where bytes wait to be combined,
        self._staged = 0  # and how many do

    # As a sink of the frame decoder -------------------------------------------------------

    def space(self) -> memoryview:
        """Room for the bytes that come next."""
        posted = self.posted
        left = self.total - self.filled
        if self.kept:
            if not self._chunk_left:
                self._add_chunk(self.mailbox.borrow_chunk(left))
                self._chunk_left = len(self._chunks[-1])
            return self._chunks[-1][-self._chunk_left :]
        if posted is None:
            return self.mailbox.waste[:left]
        if posted.combine:
            if self._block is None:
                self._block = self.mailbox.borrow_block()
            return self._block[self._staged : self._staged + left]
        return posted.view[self.filled :]

    def advance(self, count: int) -> None:
        """`count` more bytes are in `space()`."""
        self.filled += count
        posted = self.posted
        if self.kept:
            self._chunk_left -= count
        elif posted is not None and posted.combine:
            assert self._block is not None
            self._staged += count
            if self._staged == BLOCK or self.filled == self.total:
                start = posted.start + self.filled - self._staged
                combine_into(posted, start, self._block[: self._staged])
                self._staged = 0
        if self.filled == self.total:
            self.mailbox.arrived(self)

    def take(self, piece: memoryview) -> None:
        """More bytes are here, in memory that may be read now but not later."""
        posted = self.posted
        if posted is not None and posted.combine and not self._staged:
            self.filled += len(piece)
            combine_into(posted, posted.start + self.filled - len(piece), piece)
            if self.filled == self.total:
                self.mailbox.arrived(self)
            return
        while piece:
            space = self.space()[: len(piece)]
            space[:] = piece[: len(space)]
            piece = piece[len(space) :]
            self.advance(len(space))

    # For the mailbox ----------------------------------------------------------------------

    def keep_whole(self, message: memoryview) -> None:
        """Copy a message that is here, but for which nobody has asked."""
        self._add_chunk(memoryview(bytearray(message)))
        self.filled = self.total

    def hand_over(self, posted: PostedReceive) -> None:
        """A receive was posted for a message that is here, or partly here, already."""
        self.posted = posted
        self.kept = False
        if posted.combine and self._chunk_left:
            # Half an element cannot be combined: what is in the last chunk waits for its rest.
            self._block = self._chunks.pop()
            self._staged = len(self._block) - self._chunk_left
            self.mailbox.early_bytes[self.peer] -= len(self._block)
        self._empty_chunks(posted)

    def whole(self) -> None:
        """The last byte is here."""
        if self.posted is not None:
            self.posted.complete()
        self._return_block()

    def forget(self) -> None:
        """The receive was given up: what is still to come of the message is dropped."""
        self.posted = None
        self.kept = False
        self._drop_chunks()
        self._return_block()

    def take_back(self) -> None:
        """The receive was given up, but the message is not lost: keep it for the next one."""
        posted = self.posted
        assert posted is not None
        assert not posted.combine
        self.posted = None
        self.kept = True
        if self.filled:
            self._add_chunk(memoryview(bytearray(posted.view[: self.filled])))

    def _empty_chunks(self, posted: PostedReceive) -> None:
        """Put what is in the chunks where it belongs."""
        start = 0
        for chunk in self._chunks:
            part = chunk[: self.filled - self._staged - start]
            if posted.combine:
                combine_into(posted, posted.start + start, part)
            else:
                posted.view[start : start + len(part)] = part
            start += len(part)
        self._drop_chunks()

    def _add_chunk(self, chunk: memoryview) -> None:
        self._chunks.append(chunk)
        self.mailbox.early_bytes[self.peer] += len(chunk)

    def _drop_chunks(self) -> None:
        for chunk in self._chunks:
            self.mailbox.early_bytes[self.peer] -= len(chunk)
            self.mailbox.return_block(chunk)
        self._chunks.clear()
        self._chunk_left = 0

    def _return_block(self) -> None:
        self._staged = 0
        if self._block is not None:
            self.mailbox.return_block(self._block)
            self._block = None


def combine_into(posted: PostedReceive, start: int, block: memoryview) -> None:
    """Reduce bytes that came into the receiver's memory, from byte `start` of its buffer on."""
    operation = posted.ticket.operation
    if len(block) and not operation.done:
        assert operation.combine is not None
        try:
            operation.combine(posted.buffer, start, block)
        except Exception as error:
            operation.group.operation_failed(operation, error)
