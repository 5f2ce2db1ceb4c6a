"""The courier: the engine's messages and control frames, carried by a library's messages."""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from phalanx.core.failure import Failure
from phalanx.core.matching import IncomingMessage, combine_into
from phalanx.core.steps import PostedSend
from phalanx.native.base import Handle, Library
from phalanx.wire.control import Answer, Ask, FailureNotice, decode
from phalanx.wire.frame import MAX_CONTROL, Channel, FrameError, Kind

if TYPE_CHECKING:
    from phalanx.native.engine import LibraryEngine


class Courier:
    """Sends and receives for one rank. All methods are called with the engine's lock held.

    library   None: nobody is there to send to
    """

    def __init__(self, engine: LibraryEngine, library: Library | None) -> None:
        self.engine = engine
        self.library = library
        self.calls_back = library is not None and library.can.calls_back
        self.left: set[int] = set()  # peers that have closed in good order
        self._flights = Flights()
        self._peers: dict[int, Correspondent] = {}

    def begin(self) -> None:
        """Listen to every peer."""
        for rank in range(self.engine.world_size):
            if rank != self.engine.rank:
                assert self.library is not None
                self._peers[rank] = Correspondent(self, self.library, rank)
                self._peers[rank].listen()

    def poll(self) -> bool:
        """See to what is over; whether anything was."""
        return self._flights.poll()

    def may_go(self, *, let_go: bool) -> bool:
        """Whether those who are there have got every word, and (if asked for) have let this go."""
        here = [peer for peer in self._peers.values() if self._is_here(peer)]
        return not any(peer.words_out or (let_go and not peer.let_go) for peer in here)

    def close(self) -> None:
        """Nothing that comes from now on is for anybody."""
        self._flights.clear()
        if self.library is not None:
            self.library.close()

    # For the engine -------------------------------------------------------------------------

    def send(self, send: PostedSend) -> None:
        """Send a message. To a peer whose loss is just being told, it goes nowhere."""
        peer = self._peers.get(send.peer)
        if peer is not None and self._is_here(peer):
            peer.send(send)

    def send_control(self, rank: int, kind: Kind, payload: bytes = b"", group: int = 0) -> None:
        """Send a control message, if the peer is there."""
        peer = self._peers.get(rank)
        if peer is not None and self._is_here(peer):
            peer.send_control(kind, payload, group)

    def send_control_to_all(self, kind: Kind) -> None:
        """Send a control message to every peer that is there."""
        for rank in self._peers:
            self.send_control(rank, kind)

    def retract(self, send: PostedSend) -> None:
        """Give up a message."""
        if send.peer in self._peers:
            self._peers[send.peer].retract(send)

    def settle(self, send: PostedSend) -> bool:
        """Whether a message that would be given up has gone already."""
        return send.peer in self._peers and self._peers[send.peer].settle(send)

    def resume(self, rank: int) -> None:
        """There may be room again for what a peer sends."""
        if rank in self._peers:
            self._peers[rank].resume()

    # For the correspondents -----------------------------------------------------------------

    def fly(
        self, peer: Correspondent, handle: Handle, memory: memoryview, landed: Callable[[], None]
    ) -> Flight:
        """Something was started with a peer."""
        flight = Flight(handle, memory, landed, partial(self.failed, peer))
        self._flights.add(flight)
        return flight

    def failed(self, peer: Correspondent, error: Exception) -> None:
        """The library moves nothing to or from a peer any more."""
        peer.heed_farewells()
        self.lose(peer.peer, f"{peer.library.name} says: {first_line(error)}")

    def lose(self, rank: int, reason: str) -> None:
        """A peer counts as lost, unless it has left."""
        if rank not in self.left:
            self.engine.peer_lost(rank, f"rank {rank} was lost: {reason}")

    def tell_room(self, rank: int) -> None:
        """There is no room for what a peer sends, or there is again: which it may wait for."""
        self.engine.answer(rank, self.engine.state_for(rank))

    def control_came(self, peer: Correspondent, channel: Channel, payload: bytes) -> None:
        """A control message came. Raises `FrameError` for one that makes no sense."""
        engine, group, kind = self.engine, channel.group, channel.kind
        if kind is Kind.FAILURE:
            notice = decode(payload, FailureNotice)
            if not (-1 <= notice.culprit < engine.world_size > notice.reporter >= 0):
                raise FrameError(f"word of a failure of rank {notice.culprit}")
            engine.failure_came(group, Failure.from_notice(notice))
        elif kind is Kind.LEAVE_GROUP:
            engine.member_leaves(group, peer.peer)
        elif kind is Kind.LEAVE:
            self.left.add(peer.peer)
            engine.peer_leaves(peer.peer, partial(peer.send_control, Kind.HEARTBEAT))
        elif kind is Kind.HEARTBEAT:
            peer.let_go = True
        elif kind is Kind.ASK:
            engine.asked(group, peer.peer, decode(payload, Ask))
        elif kind is Kind.ANSWER:
            engine.answered(peer.peer, decode(payload, Answer))
        else:
            raise FrameError(f"a {kind.name} frame, which no library carries")

    def _is_here(self, peer: Correspondent) -> bool:
        return peer.peer not in self.left and peer.peer not in self.engine.lost


def first_line(error: Exception) -> str:
    """A library's error as a part of a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


# ------------------------------------------------------------------------------
# A correspondent: the messages to and from one peer, as words and contents (see words.py).

WORDS, CONTENTS = 0, 1  # the library's tags
PIECE = 1 << 30  # bytes of a message that the library is given at a time: its counts may be ints
EAGER = 1 << 20  # bytes of a message that is copied and sent before there is room for it,
MOST_EAGER = 16 << 20  # and of all of them that the library has not sent
MOST_WORDS = 512  # that the library has not sent; then who sends waits for it
SETTLE = 2.0  # seconds that a message whose time is over may take to end, if it has begun


class Correspondent:
    """What is under way with one peer. All methods are called with the engine's lock held.

    From the peer a word is always expected, and what it says is done as it comes. Only a message
    for which there is no room holds up those behind it, until there is.
    """

    def __init__(self, courier: Courier, library: Library, peer: int) -> None:
        self.library = library
        self.peer = peer
        self.let_go = False  # it has heard that this rank leaves, and needs nothing of it
        self.words_out = 0  # words, and copies, that the library has not sent yet
        self._eager_out = 0  # bytes of these copies
        self._courier = courier
        self._mailbox = courier.engine.matching
        self._idents = itertools.count()
        self._announced: dict[int, PostedSend] = {}  # messages that are not granted
        self._going: dict[PostedSend, Flight] = {}
        self._block = memoryview(bytearray(WORD))
        self._held: Word | None = None  # a message that there is no room for
        self._coming: dict[int, IncomingMessage] = {}  # messages that are granted, and not here
        self._coming_bytes = 0
        self._scratch = memoryview(b"")  # kept for the next message: fresh memory is slow
        self._control = bytearray()  # of a control message, the words so far
        self._landing = 0  # messages whose contents are on their way
        self._farewells: list[tuple[Channel, bytes]] = []  # to be heeded when they are here

    # Out ------------------------------------------------------------------------------------

    def send(self, send: PostedSend) -> None:
        """Send a message: a copy of it, if it is not large."""
        operation, total = send.ticket.operation, len(send.view)
        ident = next(self._idents) & 0xFFFFFFFF
        if INLINE < total <= EAGER and self._eager_out + total <= MOST_EAGER:
            copy = memoryview(bytearray(send.view))
            send.complete()
            self._say(Word(Verb.EAGER, operation.channel, ident, operation.fingerprint, total))
            self.words_out += 1
            self._eager_out += total
            self._send(copy, CONTENTS, partial(self._eager_sent, total))
            return
        payload = send.view if total <= INLINE else b""
        if total > INLINE:
            self._announced[ident] = send
        elif self.words_out < MOST_WORDS:
            send.complete()
        self._say(
            Word(Verb.MESSAGE, operation.channel, ident, operation.fingerprint, total, payload),
            send.complete if total <= INLINE else None,
        )

    def _eager_sent(self, total: int) -> None:
        self.words_out -= 1
        self._eager_out -= total

    def send_control(self, kind: Kind, payload: bytes = b"", group: int = 0) -> None:
        """Send a control message, in as many words as it needs."""
        channel = Channel(group, kind, 0)
        for start in range(0, len(payload) or 1, INLINE):
            part = payload[start : start + INLINE]
            self._say(Word(Verb.CONTROL, channel, total=len(payload), payload=part))

    def retract(self, send: PostedSend) -> None:
        """Give up a message. What has begun goes on: only `settle` sees to its memory."""
        for ident, announced in self._announced.items():
            if announced is send:
                del self._announced[ident]
                self._say(Word(Verb.CANCEL, send.ticket.operation.channel, ident))
                return
        if send in self._going and not send.ticket.operation.is_collective:
            self._courier.lose(self.peer, f"it did not take in {SETTLE:g} s what it asked for")

    def settle(self, send: PostedSend) -> bool:
        """Whether a message that would be given up has gone: if it has begun, see it through."""
        flight = self._going.get(send)
        deadline = monotonic() + SETTLE
        while flight is not None and not send.done and monotonic() < deadline:
            try:
                flight.handle.wait(0.05)
            except Exception:  # poll() meets it again
                break
            finally:
                self._courier.poll()
        return send.done

    def _say(self, word: Word, then: Callable[[], None] | None = None) -> None:
        self.words_out += 1
        self._send(pack(word), WORDS, partial(self._said, then))

    def _said(self, then: Callable[[], None] | None) -> None:
        self.words_out -= 1
        if then is not None:
            then()

    def _grant_came(self, ident: int, channel: Channel) -> None:
        """The peer has room for a message that was announced."""
        send = self._announced.pop(ident, None)
        if send is None:
            return  # it was given up, which the peer is being told
        self._say(Word(Verb.COMING, channel, ident))
        view = send.view
        for start in range(0, len(view), PIECE):
            is_last = start + PIECE >= len(view)
            then = partial(self._gone, send) if is_last else _nothing
            flight = self._send(view[start : start + PIECE], CONTENTS, then)
            if is_last and flight is not None:
                self._going[send] = flight

    def _gone(self, send: PostedSend) -> None:
        self._going.pop(send, None)
        send.complete()

    def _send(self, view: memoryview, tag: int, then: Callable[[], None]) -> Flight | None:
        """Start to send; None if the library would not, and the peer is lost."""
        courier = self._courier
        try:
            handle = self.library.send(view, self.peer, tag)
        except Exception as error:  # whatever the library raises
            courier.failed(self, error)
            return None
        return courier.fly(self, handle, view, then)

    # In -------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Expect a word."""
        self._receive(self._block, WORDS, self._word_came)

    def resume(self) -> None:
        """There may be room now for the message that was held up."""
        word = self._held
        if word is not None and self._has_room(word):
            self._held = None
            self._take(word)
            self._courier.tell_room(self.peer)
            self.listen()

    def _word_came(self) -> None:
        try:
            self._heed(unpack(self._block))
        except FrameError as error:
            self._courier.lose(self.peer, str(error))
            return
        if self._held is None:
            self.listen()
        else:
            self._courier.tell_room(self.peer)

    def _heed(self, word: Word) -> None:
        if word.verb is Verb.MESSAGE or word.verb is Verb.EAGER:
            if self._has_room(word):
                self._take(word)
            else:  # the block is not listened with until the word is taken
                self._held = word
        elif word.verb is Verb.GRANT:
            self._grant_came(word.ident, word.channel)
        elif word.verb is Verb.COMING:
            self._receive_contents(word.ident)
        elif word.verb is Verb.CANCEL:
            arrival = self._arrival_of(word.ident)
            del self._coming[word.ident]
            self._coming_bytes -= arrival.total
            self._mailbox.cancelled(arrival)
        else:
            self._control += word.payload
            if len(self._control) >= word.total:
                payload, self._control = bytes(self._control), bytearray()
                self._control_came(word.channel, payload)

    def _control_came(self, channel: Channel, payload: bytes) -> None:
        if self._landing and channel.kind in (Kind.LEAVE, Kind.LEAVE_GROUP):
            self._farewells.append((channel, payload))  # words overtake contents
        else:
            self._courier.control_came(self, channel, payload)

    def heed_farewells(self) -> None:
        """Nothing is on its way any more: what the peer said last counts."""
        farewells, self._farewells = self._farewells, []
        for channel, payload in farewells:
            self._courier.control_came(self, channel, payload)

    def _has_room(self, word: Word) -> bool:
        matching = self._mailbox
        return matching.is_wanted(word.channel, self.peer) or matching.has_room(
            None, self.peer, self._coming_bytes + word.total
        )

    def _take(self, word: Word) -> None:
        """A message begins to arrive."""
        arrival = self._mailbox.arriving(word.channel, self.peer, word.total, word.fingerprint)
        if word.total == len(word.payload) and word.verb is Verb.MESSAGE:
            fill(arrival, memoryview(word.payload))
            return
        self._coming[word.ident] = arrival
        self._coming_bytes += word.total
        if word.verb is Verb.EAGER:
            self._receive_contents(word.ident)
        else:
            self._say(Word(Verb.GRANT, word.channel, word.ident))

    def _receive_contents(self, ident: int) -> None:
        # The library would write them also where a receive that is given up wanted them: so they
        # come into memory of our own.
        total = self._arrival_of(ident).total
        self._landing += 1
        memory, self._scratch = self._scratch, memoryview(b"")
        if not total <= len(memory) <= 4 * total:
            memory = memoryview(bytearray(total))
        for start in range(0, total, PIECE):
            stop = min(total, start + PIECE)
            then = partial(self._contents_came, ident, memory) if stop == total else _nothing
            self._receive(memory[start:stop], CONTENTS, then)

    def _contents_came(self, ident: int, memory: memoryview) -> None:
        arrival = self._coming.pop(ident)
        self._coming_bytes -= arrival.total
        self._scratch = memory
        fill(arrival, memory[: arrival.total])
        self._landing -= 1
        if not self._landing and self._farewells:
            self._courier.engine.run_ready()
            self.heed_farewells()

    def _arrival_of(self, ident: int) -> IncomingMessage:
        arrival = self._coming.get(ident)
        if arrival is None:
            raise FrameError(f"word of message {ident}, which was not announced")
        return arrival

    def _receive(self, view: memoryview, tag: int, then: Callable[[], None]) -> None:
        courier = self._courier
        try:
            handle = self.library.recv(view, self.peer, tag)
        except Exception as error:  # whatever the library raises
            courier.failed(self, error)
            return
        courier.fly(self, handle, view, then)


def fill(arrival: IncomingMessage, content: memoryview) -> None:
    """All of a message is here: put it where it belongs."""
    posted = arrival.posted
    if posted is not None and posted.combine and not arrival.filled and len(content):
        combine_into(posted, posted.start, content)
        arrival.filled = arrival.total
        arrival.matching.arrived(arrival)
        return
    while arrival.filled < arrival.total:
        start = arrival.filled
        space = arrival.space()
        count = min(len(space), arrival.total - start)
        space[:count] = content[start : start + count]
        arrival.advance(count)


def _nothing() -> None:
    pass


# ------------------------------------------------------------------------------
# Words: what ranks tell each other through the library, in messages of one size.
#
# A library matches a receive with a message of exactly its size, and tells nothing else about it.
# So every message begins with a word, a block of `WORD` bytes for which a receive is always posted:
# a small message is in it whole, a larger one is announced by it. It follows at once, as a copy,
# or, if that would be large, when it is granted and has not been given up meanwhile.
#
#     sender                                        receiver
#        | -- MESSAGE 7, 40 B, and the bytes ---------> |  where the receive wants them
#        |                                              |
#        | -- EAGER 8, 64 kB -------------------------> |
#        | == 64 kB, a copy ==========================> |  when it has room for it
#        |                                              |
#        | -- MESSAGE 9, 3 MB ------------------------> |  has room for it
#        | <------------------------------- GRANT 9 --- |
#        | -- COMING 9 -------------------------------> |
#        | == 3 MB ===================================> |
#
#        | -- CONTROL FAILURE, LEAVE, ASK, ... -------> |  what TCP has control frames for
#
#   0      1      2   4        8       12      20       28            36      44   64
#   +------+------+---+--------+-------+-------+--------+-------------+-------+---+-----------------
#   | verb | kind | 0 | length | ident | group | number | fingerprint | total | 0 | payload, padding
#   +------+------+---+--------+-------+-------+--------+-------------+-------+---+-----------------

# The payload begins at a multiple of 16: torch computes with it where it lies.
_HEADER = struct.Struct("<BBHIIQqQQ20x")
_PADDING = bytes(2048)
WORD = 2048  # bytes; under the size from which libraries send nothing before they are asked
INLINE = WORD - _HEADER.size  # bytes of payload that a word has room for


class Verb(enum.IntEnum):
    """What a word says."""

    MESSAGE = 1  # here is a message, or (longer than `INLINE`) there is one: may it come?
    EAGER = 2  # there is one, and it is on its way
    GRANT = 3  # it may come
    COMING = 4  # it does, now
    CANCEL = 5  # or it will not, granted or not
    CONTROL = 6  # about a group, as TCP's control frames; goes on in the next word if it is long


class Word(NamedTuple):
    """One word. The payload is a part of the block that it came in."""

    verb: Verb
    channel: Channel
    ident: int = 0  # of a message among those from this sender
    fingerprint: int = 0
    total: int = 0  # bytes of the whole message
    payload: memoryview | bytes = b""


def pack(word: Word) -> memoryview:
    """The block for a word, new."""
    (group, kind, number), payload = word.channel, word.payload
    header = _HEADER.pack(
        word.verb,
        kind,
        0,
        len(payload),
        word.ident,
        group,
        number,
        word.fingerprint,
        word.total,
    )
    return memoryview(b"".join((header, payload, _PADDING[: INLINE - len(payload)])))


def unpack(block: memoryview) -> Word:
    """The word in a block. Raises `FrameError` for anything that cannot be one."""
    verb, kind, zero, length, ident, group, number, fingerprint, total = _HEADER.unpack_from(block)
    try:
        channel = Channel(group, Kind(kind), number)
        known = Verb(verb)
    except ValueError as error:
        raise FrameError(f"a word that says nothing: {error}") from None
    if zero or length > INLINE or length > total:
        raise FrameError(f"a word of {length} bytes of {total}")
    if known is Verb.CONTROL and total > MAX_CONTROL:
        raise FrameError(f"a control message announces {total} bytes, more than {MAX_CONTROL}")
    payload = block[_HEADER.size : _HEADER.size + length]
    return Word(known, channel, ident, fingerprint, total, payload)


# ------------------------------------------------------------------------------
# Flights: what is under way in a library, and what is to be done when it lands.


class Flight:
    """One thing under way, in memory that it keeps alive.

    landed   called when it is over
    failed   called with the library's error, if it does not come to that
    """

    __slots__ = ("_memory", "failed", "handle", "landed")

    def __init__(
        self,
        handle: Handle,
        memory: memoryview,
        landed: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.handle = handle
        self._memory = memory
        self.landed = landed
        self.failed = failed


class Flights:
    """All that is under way, asked in the order in which it was started."""

    def __init__(self) -> None:
        self._flying: dict[Flight, None] = {}

    def add(self, flight: Flight) -> None:
        """Something was started."""
        self._flying[flight] = None

    def clear(self) -> None:
        """Nobody wants to know any more."""
        self._flying.clear()

    def poll(self) -> bool:
        """See to all that is over; whether anything was."""
        any_over = False
        for flight in list(self._flying):
            if flight not in self._flying:
                continue  # an end further up has ended this one, too
            try:
                over = flight.handle.done()
            except Exception as error:  # whatever the library raises
                del self._flying[flight]
                any_over = True
                flight.failed(error)
                continue
            if over:
                del self._flying[flight]
                any_over = True
                flight.landed()
        return any_over
