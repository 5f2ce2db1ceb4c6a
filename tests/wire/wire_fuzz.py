"""Bytes that nobody should send, by the million, to everything that reads from a wire.

    python tests/wire/wire_fuzz.py [--seconds 60] [--seed N] [--only frames|handshakes|messages]

    frames      streams of valid frames, damaged in every way below, in pieces of every size, to
                the frame decoder; beside it a decoder that is too simple to be wrong
    handshakes  both sides of a conversation of which any message is damaged, replayed or swapped
    messages    MessagePack, damaged, to the decoder of every control message

Whatever comes: nothing but `FrameError` or `Refused` is raised; what is delivered is what the
valid frames before the damage say; no room is taken beyond the limits; who has refused once goes on
refusing; nobody gets in. Prints the seed first, and N of N at the end; the first violation is
raised, with the number of its round: `--seed N --first ROUND` plays it again.
"""

from __future__ import annotations

import argparse
import random
import re
import secrets
import struct
import sys
import time
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from phalanx.wire import control as messages
from phalanx.wire.frame import (
    HEADER_SIZE,
    MAX_CONTROL,
    MAX_PAYLOAD,
    STAGING,
    Channel,
    FrameDecoder,
    FrameError,
    Header,
    Kind,
    pack_header,
    unpack_header,
)
from phalanx.wire.handshake import (
    ROOM,
    AcceptorHandshake,
    DialerHandshake,
    Handshake,
    Identity,
    Refused,
)

MESSAGES = tuple(kind for kind in Kind if kind < Kind.CANCEL)
CONTROLS = tuple(kind for kind in Kind if kind >= Kind.CANCEL)
SIZES = (0, 0, 1, 2, 7, 40, 300, 2000)
NUMBERS = (0, 1, 51, 52, 53, MAX_CONTROL, MAX_CONTROL + 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 2**31)
CRUMBS = (1, 2, 3, 5, 51, 52, 53)  # sizes of pieces, for short streams
PIECES = (500, 2000, STAGING - 1, STAGING)

# Frames --------------------------------------------------------------------------------------


def frame(rng: random.Random) -> bytes:
    """A valid frame."""
    kind = rng.choice(MESSAGES if rng.random() < 0.7 else CONTROLS)
    size = rng.choice(SIZES)
    before, behind = (rng.choice(SIZES), rng.choice(SIZES)) if kind in MESSAGES else (0, 0)
    channel = Channel(rng.getrandbits(64), kind, rng.getrandbits(63))
    header = pack_header(
        channel,
        fingerprint=rng.getrandbits(64),
        length=size,
        total=before + size + behind,
        offset=before,
    )
    return header + rng.randbytes(size)


POOL = tuple(frame(random.Random(number)) for number in range(512))


def _flip(rng: random.Random, stream: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 8))):
        stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)


def _drop(rng: random.Random, stream: bytearray) -> None:
    place = rng.randrange(len(stream))
    del stream[place : place + rng.choice((1, 4, 52))]


def _insert(rng: random.Random, stream: bytearray) -> None:
    place = rng.randrange(len(stream) + 1)
    stream[place:place] = rng.randbytes(rng.choice((1, 4, 52)))


def _cut_off(rng: random.Random, stream: bytearray) -> None:
    del stream[rng.randrange(len(stream) + 1) :]


def _lie(rng: random.Random, stream: bytearray) -> None:
    """Another length, total, offset or kind in the header of a frame."""
    starts = [match.start() for match in re.finditer(b"PHLX", stream)]
    start = rng.choice(starts or [0])
    place, form = rng.choice(((8, "<I"), (36, "<Q"), (44, "<Q"), (5, "<B"), (4, "<B"), (6, "<H")))
    if start + HEADER_SIZE > len(stream):
        return
    most = (1 << 8 * struct.calcsize(form)) - 1
    value = rng.choice((rng.choice(NUMBERS), rng.getrandbits(64), most)) & most
    struct.pack_into(form, stream, start + place, value)


def _noise(rng: random.Random, stream: bytearray) -> None:
    stream[:] = rng.randbytes(len(stream))


def _nothing(rng: random.Random, stream: bytearray) -> None:
    """Not all that comes is bad."""


DAMAGES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    _flip,
    _drop,
    _insert,
    _cut_off,
    _lie,
    _lie,
    _noise,
    _nothing,
)


def damaged(rng: random.Random, stream: bytes) -> bytes:
    """The stream, with something wrong with it."""
    result = bytearray(stream)
    for _ in range(rng.choice((1, 1, 2))):
        if result:
            rng.choice(DAMAGES)(rng, result)
    return bytes(result)


def expected(stream: bytes) -> tuple[list[tuple[Header, bytes]], bool]:
    """What the valid frames at its beginning say, the last as far as it came; is there an error?"""
    found: list[tuple[Header, bytes]] = []
    place = 0
    while place + HEADER_SIZE <= len(stream):
        try:
            header = unpack_header(stream, place)
        except FrameError:
            return found, True
        place += HEADER_SIZE
        payload = stream[place : place + header.length]
        if header.channel.kind in MESSAGES or len(payload) == header.length:
            found.append((header, payload))
        place += header.length
    return found, False


class Receiver:
    """Takes everything down. Sinks give little room at a time, some messages have to wait."""

    def __init__(self, rng: random.Random, *, crumbs: bool) -> None:
        self.found: list[tuple[Header, bytearray]] = []
        self._room = memoryview(bytearray(rng.choice(CRUMBS if crumbs else (100, 4096, 4096))))
        self._refusals = rng.choice((0.0, 0.0, 0.3))
        self._rng = rng

    def message(self, header: Header, whole: memoryview | None) -> Sink | bool:
        assert header.length <= MAX_PAYLOAD, header
        assert header.offset + header.length <= header.total, header
        if whole is not None:
            assert header.offset == 0, header
            assert len(whole) == header.length == header.total, header
        if self._refusals and self._rng.random() < self._refusals:
            return False
        content = bytearray(whole or b"")
        self.found.append((header, content))
        return whole is not None or Sink(content, self._room)

    def control(self, header: Header, payload: bytes) -> None:
        assert len(payload) == header.length <= MAX_CONTROL, header
        self.found.append((header, bytearray(payload)))


class Sink:
    def __init__(self, content: bytearray, room: memoryview) -> None:
        self._content = content
        self._room = room

    def space(self) -> memoryview:
        return self._room

    def advance(self, count: int) -> None:
        assert 0 < count <= len(self._room)
        self._content += self._room[:count]


def feed(decoder: FrameDecoder, stream: bytes, cut: Callable[[], int]) -> None:
    """What a driver does: writes into `space()`, however much comes at a time."""
    view, place = memoryview(stream), 0
    turns = 0
    while place < len(view) or decoder.paused:
        turns += 1
        assert turns < 20 * len(stream) + 1000, "the decoder does not get on"
        if decoder.paused:
            decoder.received(0)
        space = decoder.space()
        assert len(space) <= max(STAGING, MAX_PAYLOAD)
        count = min(len(space), cut(), len(view) - place)
        if count:
            space[:count] = view[place : place + count]
            place += count
            decoder.received(count)
        else:
            assert decoder.paused or place == len(view), "no room, and not paused"


def fuzz_frames(rng: random.Random) -> int:
    """One stream; returns how many frames the decoder has seen of it, a bad one included."""
    crumbs = rng.random() < 0.2
    count = rng.choice((1, 2, 3) if crumbs else (1, 10, 40, 160))
    stream = damaged(rng, b"".join(rng.choices(POOL, k=count)))
    receiver = Receiver(rng, crumbs=crumbs)
    decoder = FrameDecoder(receiver)
    size = rng.choice(CRUMBS if crumbs else PIECES)
    cut = (lambda: size) if rng.random() < 0.5 else (lambda: 1 + int(size * rng.random()))
    wanted, broken = expected(stream)
    raised = False
    try:
        feed(decoder, stream, cut)
    except FrameError:
        raised = True
    found = [(header, bytes(content)) for header, content in receiver.found]
    assert raised == broken, "an error that is none, or none that is one"
    assert found == wanted, "something else was delivered than was sent"
    if raised:
        before = len(receiver.found)
        for more in (frame(rng), b""):
            try:
                space = decoder.space()
                space[: len(more)] = more[: len(space)]
                decoder.received(len(more))
            except StopIteration:  # the stream ended with the error
                continue
            raise AssertionError("after an error the decoder went on")
        assert len(receiver.found) == before, "after an error something was delivered"
    return len(wanted) + broken


# Handshakes ----------------------------------------------------------------------------------

TOKEN = bytes(range(32))
ACCEPTOR, DIALER = Identity("job", 3, 0, 4), Identity("job", 3, 2, 4)


def _welcome(peer: int) -> None:
    return None


def _hear(side: Handshake, words: bytes, rng: random.Random) -> bytes:
    """Give a side what came, in pieces for which it has room; its answer, whatever happens."""
    reply = b""
    while words and not side.complete:
        count = min(rng.randrange(1, 100), side.room)
        reply += side.receive(words[:count])
        words = words[count:]
        assert len(side.surplus) <= ROOM
    return reply


def fuzz_handshakes(rng: random.Random) -> int:
    """One conversation through a middle that damages some of it; returns how many messages."""
    one = DialerHandshake(DIALER, TOKEN, 0)
    other = AcceptorHandshake(ACCEPTOR, TOKEN, _welcome)
    old = [DialerHandshake(DIALER, TOKEN, 0).start()]
    old.append(AcceptorHandshake(ACCEPTOR, TOKEN, _welcome).receive(old[0]))
    words = one.start()
    intact: list[bool] = []
    refusal: Refused | None = None
    for side in (other, one, other, one):
        if not words:
            break
        came = words
        if rng.random() < 0.4:
            noise = rng.randbytes(len(words))
            came = rng.choice((damaged(rng, words), rng.choice(old), words + words, noise))
        intact.append(came.startswith(words))
        try:
            words = _hear(side, came, rng)
        except Refused as refused:
            refusal = refused
            break
    assert refusal is None or refusal.reason.isprintable()
    assert max(len(one.farewell), len(other.farewell)) <= ROOM
    assert not other.complete or intact[:3] == [True] * 3, "an unauthenticated caller got in"
    assert not one.complete or intact == [True] * 4, "a rank joined an unauthenticated peer"
    assert one.complete or not all(intact) or len(intact) < 4, "a rank was not let in"
    return len(intact)


# Messages ------------------------------------------------------------------------------------

STRUCTS: tuple[type[msgspec.Struct], ...] = tuple(
    value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
)

HINTS = {kind: typing.get_type_hints(kind) for kind in STRUCTS}


def value(rng: random.Random, kind: Any) -> Any:
    """Something of that type."""
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        return [value(rng, inner) for _ in range(rng.choice((0, 1, 3)))]
    if isinstance(kind, types.UnionType):
        return value(rng, rng.choice(typing.get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{name: value(rng, hint) for name, hint in HINTS[kind].items()})
    table: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice((0, 1, -1, 2**31, 2**63 - 1, -(2**63), rng.getrandbits(62))),
        str: lambda: "".join(rng.choices("A\n\0\u20ac", k=rng.choice(SIZES))),
        bool: lambda: rng.random() < 0.5,
        float: rng.random,
    }
    return table[kind]()


def fuzz_messages(rng: random.Random) -> int:
    """Each control message once, damaged."""
    for kind in STRUCTS:
        whole = messages.encode(value(rng, kind))
        payload = damaged(rng, whole)
        try:
            message = messages.decode(payload, kind)
        except FrameError:
            assert payload != whole, f"a {kind.__name__} that is right was not read"
            continue
        assert type(message) is kind
    return len(STRUCTS)


# All of it -----------------------------------------------------------------------------------

FUZZERS: dict[str, Callable[[random.Random], int]] = {
    "frames": fuzz_frames,
    "handshakes": fuzz_handshakes,
    "messages": fuzz_messages,
}


def fuzz(
    name: str, seed: int, *, rounds: int | None = None, seconds: float = 0.0, first: int = 0
) -> int:
    """So many rounds, or for so long; returns how many frames or messages they had."""
    fuzzer, count, number = FUZZERS[name], 0, first
    end = time.monotonic() + seconds
    while number - first < rounds if rounds is not None else time.monotonic() < end:
        try:
            count += fuzzer(random.Random(seed * 2**40 + number))
        except BaseException:
            print(f"violated: --only {name} --seed {seed} --first {number}", file=sys.stderr)
            raise
        number += 1
    return count


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--first", type=int, default=0, help="round to begin with")
    parser.add_argument("--only", choices=[*FUZZERS], action="append")
    options = parser.parse_args(arguments)
    print(f"--seed {options.seed}", flush=True)
    for name in options.only or FUZZERS:
        count = fuzz(name, options.seed, seconds=options.seconds, first=options.first)
        print(f"{name}: {count:,} of {count:,} did no harm", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
