"""A correspondent: the messages to and from one peer, as words and contents (see words.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from phalanx.backends.engine import PostedSend
from phalanx.backends.engine.arrival import Arrival, combine_into
from phalanx.backends.library.flights import Flight
from phalanx.backends.library.library import Library
from phalanx.backends.library.words import INLINE, WORD, Verb, Word, pack, unpack
from phalanx.wire.frame import Channel, FrameError, Kind

if TYPE_CHECKING:
    from phalanx.backends.library.courier import Courier

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
        self._mailbox = courier.engine.mailbox
        self._idents = itertools.count()
        self._announced: dict[int, PostedSend] = {}  # messages that are not granted
        self._going: dict[PostedSend, Flight] = {}
        self._block = memoryview(bytearray(WORD))
        self._held: Word | None = None  # a message that there is no room for
        self._coming: dict[int, Arrival] = {}  # messages that are granted, and not here
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
        mailbox = self._mailbox
        return mailbox.is_wanted(word.channel, self.peer) or mailbox.has_room(
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

    def _arrival_of(self, ident: int) -> Arrival:
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


def fill(arrival: Arrival, content: memoryview) -> None:
    """All of a message is here: put it where it belongs."""
    posted = arrival.posted
    if posted is not None and posted.combine and not arrival.filled and len(content):
        combine_into(posted, posted.start, content)
        arrival.filled = arrival.total
        arrival.mailbox.arrived(arrival)
        return
    while arrival.filled < arrival.total:
        start = arrival.filled
        space = arrival.space()
        count = min(len(space), arrival.total - start)
        space[:count] = content[start : start + count]
        arrival.advance(count)


def _nothing() -> None:
    pass
