"""Matching: posted receives and incoming messages, whichever comes first.

A message is identified by its sender and its channel; messages of one sender on one channel stay in
order. A message without a posted receive is *unexpected*. It is kept, up to a limit for each peer,
so that ranks may send before the others receive. Receives of one channel are served in the order in
which they were posted; one from any sender takes the message that came first.

              message begins                      receive is posted
                    |                                    |
        receive posted? -yes-> into its memory    unexpected message? -yes-> copied from it
                    |                                    |
                    no -> kept as unexpected             no -> waits
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable

from typing_extensions import override

from phalanx.core.posted import PostedReceive
from phalanx.core.steps import ANY
from phalanx.errors import DistributedError, SizeMismatchError
from phalanx.wire.frame import MAX_PAYLOAD, Channel

UNEXPECTED_LIMIT = 256 << 20  # bytes that the unexpected messages of each peer may take
# Their memory beside their content, measured: a message, memory for content, and a channel's
# queue. An empty message takes the first, and the third if it is alone on its channel.
MESSAGE, CHUNK, CHANNEL = 440, 448, 960
BLOCKS_KEPT = 16  # unused blocks, 8 MiB
MAX_DISCARDED = 64 << 10  # bytes of a dropped message that are read at a time


def is_full(kept: int) -> bool:
    """Return whether a rank that keeps `kept` bytes of a peer may not take the next frame."""
    return kept > UNEXPECTED_LIMIT - MAX_PAYLOAD


class Unexpected(dict[tuple[Channel, int], "deque[IncomingMessage]"]):
    """The unexpected messages by channel and sender. Their queues take memory, too: `taken`."""

    def __init__(self, taken: defaultdict[int, int]) -> None:
        self._taken = taken

    def __missing__(self, key: tuple[Channel, int]) -> deque[IncomingMessage]:
        self._taken[key[1]] += CHANNEL
        queue = self[key] = deque()
        return queue

    @override
    def __delitem__(self, key: tuple[Channel, int]) -> None:
        super().__delitem__(key)
        self._taken[key[1]] -= CHANNEL


class Matching:
    """The posted receives and the incoming messages of one rank."""

    def __init__(self, is_stale: Callable[[Channel, int], bool]) -> None:
        self._is_stale = is_stale  # whether a message is for a collective that is over
        self._over: set[int] = set()  # groups that are broken or closed
        self.discarded = memoryview(bytearray(MAX_DISCARDED))
        self._blocks: list[memoryview] = []
        self._posted: defaultdict[tuple[Channel, int], deque[PostedReceive]] = defaultdict(deque)
        self._from_any = 0  # how many of the posted receives take any sender's message
        self.in_progress: dict[PostedReceive, IncomingMessage] = {}
        self._order = itertools.count(1)
        self.traced = False  # whether to note when the first byte of a round comes
        self.unexpected_bytes: defaultdict[int, int] = defaultdict(int)  # taken, by peer
        self.unexpected = Unexpected(self.unexpected_bytes)

    def post(self, channel: Channel, posted: PostedReceive) -> None:
        """Post a receive. Raise if the message that it matches does not fit it."""
        if not posted.order:
            posted.order = next(self._order)
        if posted.from_any:
            posted.peer = self._first_sender(channel)
        key = (channel, posted.peer)
        unexpected = self.unexpected.get(key)
        if not unexpected:  # it waits, behind those that were posted before it
            queue = self._posted[key]
            place = len(queue)
            while place and queue[place - 1].order > posted.order:
                place -= 1
            queue.insert(place, posted)
            self._from_any += posted.from_any
            return
        incoming = unexpected.popleft()
        if not unexpected:
            del self.unexpected[key]
        call = posted.work.call
        same, whole = incoming.fingerprint == call.fingerprint, incoming.filled == incoming.total
        if same and incoming.kept and incoming.total == posted.stop - posted.start:
            incoming.hand_over(posted)
            if whole:
                posted.complete()
            else:
                self.in_progress[posted] = incoming
            return
        incoming.forget()
        if not same:
            # Another operation's. The receive stays posted until the checker has asked.
            posted.work.group.checker.met_another(call, incoming.peer)
        elif whole:
            raise _size_mismatch(incoming, posted)
        else:
            self._meets_misfit(incoming, posted)

    def _meets_misfit(self, incoming: IncomingMessage, posted: PostedReceive) -> None:
        """Let a message of another size be an error once it is whole, as it may be cancelled."""
        incoming.misfit = posted
        self.in_progress[posted] = incoming

    def _first_sender(self, channel: Channel) -> int:
        """Return the sender of the first unexpected message on a channel, or ANY."""
        heads = [
            (kept[0].order, peer) for (c, peer), kept in self.unexpected.items() if c == channel
        ]
        return min(heads)[1] if heads else ANY

    def _dequeue(self, key: tuple[Channel, int], posted: PostedReceive) -> None:
        queue = self._posted.get(key)
        if queue and posted in queue:
            queue.remove(posted)
            self._from_any -= posted.from_any
            if not queue:
                del self._posted[key]

    def _next_receive(self, channel: Channel, peer: int) -> PostedReceive | None:
        """Remove and return the receive that takes the next message of this peer, if any."""
        key = (channel, peer)
        queue = self._posted.get(key)
        if self._from_any:
            others = self._posted.get((channel, ANY))
            if others and (not queue or others[0].order < queue[0].order):
                key, queue = (channel, ANY), others
        if not queue:
            return None
        posted = queue.popleft()
        if not queue:
            del self._posted[key]
        self._from_any -= posted.from_any
        posted.peer = peer
        return posted

    def arriving(
        self, channel: Channel, peer: int, total: int, fingerprint: int
    ) -> IncomingMessage:
        """Take a message that begins to arrive; return the place of its bytes."""
        incoming = IncomingMessage(self, channel, peer, total, fingerprint)
        posted = self._next_receive(channel, peer)
        if posted is not None:
            if self.traced:
                posted.round.first_heard()
            work = posted.work
            if fingerprint == work.call.fingerprint and total == posted.stop - posted.start:
                incoming.posted = posted
                self.in_progress[posted] = incoming
            elif fingerprint == work.call.fingerprint:
                self._meets_misfit(incoming, posted)
            else:
                work.group.checker.met_another(work.call, peer)
        elif channel.group not in self._over and not self._is_stale(channel, peer):
            incoming.keep()
            incoming.order = next(self._order)
            self.unexpected[channel, peer].append(incoming)
        if total == 0:
            incoming.arrived()
        return incoming

    def deliver(self, channel: Channel, peer: int, message: memoryview, fingerprint: int) -> None:
        """Take a whole message, in memory that is only valid during this call."""
        incoming = self.arriving(channel, peer, len(message), fingerprint)
        posted = incoming.posted
        if not len(message):
            return
        if incoming.kept:
            incoming.keep_whole(message)
            return
        if posted is not None and posted.combine:
            combine_into(posted, posted.start, message)
        elif posted is not None:
            posted.view[:] = message
        incoming.filled = incoming.total
        incoming.arrived()

    def has_room(self, incoming: IncomingMessage | None, peer: int, count: int) -> bool:
        """Return whether `count` more bytes fit, of this message or (None) of a new one."""
        if incoming is not None and not incoming.kept:
            return True
        if incoming is None:
            count += MESSAGE + CHUNK + CHANNEL
        return self.unexpected_bytes[peer] + count <= UNEXPECTED_LIMIT

    def is_wanted(self, channel: Channel, peer: int) -> bool:
        """Return whether a receive waits for a message on this channel; others are dropped."""
        return (
            (channel, peer) in self._posted
            or (channel, ANY) in self._posted
            or channel.group in self._over
        )

    def unexpected_from(self, channel: Channel) -> int | None:
        """Return a peer that has sent an unexpected message on this channel, if there is one."""
        if not self.unexpected:
            return None
        return next((peer for known, peer in self.unexpected if known == channel), None)

    def borrow_block(self) -> memoryview:
        """Return a block to collect bytes in before they are combined."""
        return self._blocks.pop() if self._blocks else memoryview(bytearray(BLOCK))

    def borrow_chunk(self, left: int) -> memoryview:
        """Return memory for an unexpected message, of which `left` bytes are to come."""
        return self.borrow_block() if left >= BLOCK else memoryview(bytearray(left))

    def return_block(self, block: memoryview | None) -> None:
        """Take a block, or chunk, back. Keep it: allocating memory costs more than filling."""
        if block is not None and len(block) == BLOCK and len(self._blocks) < BLOCKS_KEPT:
            self._blocks.append(block)

    def withdraw(self, posted: PostedReceive) -> None:
        """Give up a receive. The rest of its message, if any, does not touch its memory."""
        work = posted.work
        channel = work.channel
        incoming = self.in_progress.pop(posted, None)
        if incoming is None:
            self._dequeue((channel, posted.peer), posted)
        elif work.is_collective:
            incoming.forget()
        else:
            incoming.take_back()
            self.unexpected[channel, posted.peer].appendleft(incoming)
            self._rematch_waiting(channel, posted.peer)

    def _rematch_waiting(self, channel: Channel, peer: int) -> None:
        """Match a message that was put back with other threads' receives, in their order."""
        waiting = [
            p for key in ((channel, peer), (channel, ANY)) for p in self._posted.get(key, ())
        ]
        for posted in sorted(waiting, key=lambda posted: posted.order):
            self._dequeue((channel, posted.peer), posted)
            self._rematch(channel, posted)

    def _rematch(self, channel: Channel, posted: PostedReceive) -> None:
        """Match a receive again that lost its message. If the next does not fit, it fails alone."""
        work = posted.work
        try:
            self.post(channel, posted)
        except DistributedError as error:
            work.group.work_failed(work, error)

    def cancelled(self, incoming: IncomingMessage) -> None:
        """Drop a message that the sender gave up in the middle: its receive waits for the next."""
        key = (incoming.channel, incoming.peer)
        posted = incoming.posted or incoming.misfit
        if posted is not None:
            del self.in_progress[posted]
        elif incoming in self.unexpected.get(key, ()):
            self.unexpected[key].remove(incoming)
            if not self.unexpected[key]:
                del self.unexpected[key]
        incoming.forget()
        if posted is not None:
            self._rematch(incoming.channel, posted)

    def is_over(self, group: int) -> bool:
        """Return whether a group is broken or closed."""
        return group in self._over

    def forget_group(self, group: int) -> None:
        """Drop a broken or closed group's messages, those still to come, too."""
        self._over.add(group)
        for key in [key for key in self.unexpected if key[0].group == group]:
            for incoming in self.unexpected[key]:
                incoming.forget()
            del self.unexpected[key]


def _size_mismatch(incoming: IncomingMessage, posted: PostedReceive) -> SizeMismatchError:
    work, group = posted.work, posted.work.group
    peer, expected = group.to_local[incoming.peer], posted.stop - posted.start
    dropped = ", dropped since an earlier receive had another size"
    return SizeMismatchError(
        f"rank {group.name}: {work.describe()} expected {expected} bytes from "
        f"rank {group.name_of(peer)}, which sent {incoming.total} bytes"
        f"{dropped if incoming.total == expected else ''}",
        rank=group.rank,
        peer=peer,
        op=work.name,
        sequence=work.sequence,
    )


# ------------------------------------------------------------------------------
# A message that is arriving: the places of its bytes.

# Bytes that are read before they are combined: each read is a system call, and the bytes read have
# to be in the second-level cache still.
BLOCK = 512 << 10


class IncomingMessage:
    """A message that is arriving, and the place of its bytes.

    matched, not combined    straight into the receiver's memory
    matched, combined        into a block; when that is full, it is reduced into the memory
    unexpected               into chunks, allocated as the bytes come
    returned                 into chunks, too, although it may be matched again: to that receive's
                             memory once it is whole. So a byte is copied three times at most,
                             however many receives are given up
    discarded                nowhere
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
        "matching",
        "misfit",
        "order",
        "peer",
        "posted",
        "returned",
        "total",
    )

    def __init__(
        self, matching: Matching, channel: Channel, peer: int, total: int, fingerprint: int
    ) -> None:
        self.matching = matching
        self.channel = channel
        self.peer = peer
        self.total = total
        self.fingerprint = fingerprint
        self.filled = 0
        self.posted: PostedReceive | None = None
        self.misfit: PostedReceive | None = None  # of another size, which waits for its end
        self.kept = False  # whether it is unexpected
        self.returned = False  # whether a receive that had matched it was given up
        self.order = 0  # among the messages that are kept
        self._chunks: list[memoryview] = []
        self._chunk_left = 0  # free bytes at the end of the last chunk
        self._block: memoryview | None = None  # bytes that wait to be combined,
        self._staged = 0  # and how many do

    # As a sink of the frame decoder -------------------------------------------------------

    def space(self) -> memoryview:
        """Return room for the next bytes."""
        posted = self.posted
        left = self.total - self.filled
        if self.kept or self.returned:
            if not self._chunk_left:
                self._add_chunk(self.matching.borrow_chunk(left))
                self._chunk_left = len(self._chunks[-1])
            return self._chunks[-1][-self._chunk_left :]
        if posted is None:
            return self.matching.discarded[:left]
        if posted.combine:
            if self._block is None:
                self._block = self.matching.borrow_block()
            return self._block[self._staged : self._staged + left]
        return posted.view[self.filled :]

    def advance(self, count: int) -> None:
        """Count `count` more bytes in `space()`."""
        self.filled += count
        posted = self.posted
        if self.kept or self.returned:
            self._chunk_left -= count
        elif posted is not None and posted.combine:
            assert self._block is not None
            self._staged += count
            if self._staged == BLOCK or self.filled == self.total:
                start = posted.start + self.filled - self._staged
                combine_into(posted, start, self._block[: self._staged])
                self._staged = 0
        if self.filled == self.total:
            self.arrived()

    def take(self, piece: memoryview) -> None:
        """Take more bytes, from memory that is only valid during this call."""
        posted = self.posted
        if posted is not None and posted.combine and not self._staged:
            self.filled += len(piece)
            combine_into(posted, posted.start + self.filled - len(piece), piece)
            if self.filled == self.total:
                self.arrived()
            return
        while piece:
            space = self.space()[: len(piece)]
            space[:] = piece[: len(space)]
            piece = piece[len(space) :]
            self.advance(len(space))

    # For the matching ----------------------------------------------------------------------

    def keep(self, kept: bool = True) -> None:
        """Count its memory as that of an unexpected message, or no more."""
        taken = MESSAGE
        if self._chunks:
            taken += CHUNK * len(self._chunks) + sum(map(len, self._chunks))
        self.matching.unexpected_bytes[self.peer] += taken * (kept - self.kept)
        self.kept = kept

    def keep_whole(self, message: memoryview) -> None:
        """Copy an unexpected message that has arrived whole."""
        self._add_chunk(memoryview(bytearray(message)))
        self.filled = self.total

    def hand_over(self, posted: PostedReceive) -> None:
        """Give the bytes that are here already to a receive that was posted late."""
        self.posted = posted
        self.keep(False)
        if self.returned and self.filled < self.total:
            return
        if posted.combine and self._chunk_left:
            # Half an element cannot be combined: the last chunk waits for its rest.
            self._block = self._chunks.pop()
            self._staged = len(self._block) - self._chunk_left
        self._empty_chunks(posted)

    def arrived(self) -> None:
        """Complete the message: the last byte is here."""
        posted = self.posted
        if posted is not None:
            self.matching.in_progress.pop(posted, None)
            if self.returned:
                self._empty_chunks(posted)
            posted.complete()
            if self._block is not None:
                self.matching.return_block(self._block)
                self._block = None
        elif self.misfit is not None:
            misfit, self.misfit = self.misfit, None
            self.matching.in_progress.pop(misfit, None)
            misfit.work.group.work_failed(misfit.work, _size_mismatch(self, misfit))

    def forget(self) -> None:
        """Drop the rest of the message: its receive was given up."""
        self.posted = self.misfit = None
        self.returned = False
        self.keep(False)
        self._drop_chunks()
        self._staged = 0
        self.matching.return_block(self._block)
        self._block = None

    def take_back(self) -> None:
        """Keep the message for the next receive: its own was given up."""
        posted, self.posted, self.misfit = self.posted, None, None
        if posted is None:  # it did not fit, and its rest is dropped
            return
        assert not posted.combine
        if not self.returned:
            self.returned = True
            if self.filled:
                self._chunks.append(memoryview(bytearray(posted.view[: self.filled])))
        self.keep()

    def _empty_chunks(self, posted: PostedReceive) -> None:
        """Move the chunks' bytes to the receive's memory."""
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
        if self.kept:
            self.matching.unexpected_bytes[self.peer] += CHUNK + len(chunk)

    def _drop_chunks(self) -> None:
        for chunk in self._chunks:
            self.matching.return_block(chunk)
        self._chunks.clear()
        self._chunk_left = 0


def combine_into(posted: PostedReceive, start: int, block: memoryview) -> None:
    """Reduce bytes that came into the receiver's memory, from its buffer's byte `start` on."""
    work = posted.work
    if len(block) and not work.over:
        assert work.combine is not None
        try:
            work.combine(posted.buffer, start, block)
        except Exception as error:
            work.group.work_failed(work, error)
