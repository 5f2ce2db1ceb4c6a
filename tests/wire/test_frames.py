"""Frames: whatever way a stream of bytes is cut, the same frames come out."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from forms import examples
from framing import framed
from hypothesis import given, settings
from hypothesis import strategies as st

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
)

MESSAGES = (Kind.COLLECTIVE, Kind.POINT_TO_POINT)
CONTROLS = tuple(kind for kind in Kind if kind not in MESSAGES)


class Collector:
    """Collects what a decoder finds; sinks give room for `window` bytes at a time."""

    def __init__(self, window: int = 1 << 30, *, refuse: int = 0) -> None:
        self.window = window
        self.refuse = refuse  # how many times to say "not now" before each message
        self.messages: list[tuple[Header, bytearray]] = []
        self.controls: list[tuple[Header, bytes]] = []
        self._left = refuse

    def message(self, header: Header, whole: memoryview | None) -> _Sink | bool:
        if self._left:
            self._left -= 1
            return False
        self._left = self.refuse
        if header.offset == 0:
            self.messages.append((header, bytearray(whole or b"")))
        return whole is not None or _Sink(self.messages[-1][1], self.window)

    def control(self, header: Header, payload: bytes) -> None:
        self.controls.append((header, payload))

    @property
    def found(self) -> list[tuple[Channel, int, int, bytes]]:
        return [(h.channel, h.fingerprint, h.total, bytes(content)) for h, content in self.messages]


class _Sink:
    def __init__(self, content: bytearray, window: int) -> None:
        self._content = content
        self._room = bytearray(min(window, MAX_PAYLOAD))

    def space(self) -> memoryview:
        return memoryview(self._room)

    def advance(self, count: int) -> None:
        self._content += self._room[:count]


def feed(decoder: FrameDecoder, stream: bytes, cuts: list[int]) -> None:
    """What a driver does with bytes that come in pieces, the last piece being the rest."""
    view, place = memoryview(stream), 0
    for cut in [*cuts, len(stream)]:
        stop = min(place + cut, len(view))
        while place < stop:
            if decoder.paused:
                decoder.received(0)
            space = decoder.space()
            count = min(len(space), stop - place)
            space[:count] = view[place : place + count]
            place += count
            if count:
                decoder.received(count)
    while decoder.paused:
        decoder.received(0)


def stream_of(messages: list[tuple[Channel, int, bytes]]) -> bytes:
    return b"".join(framed(channel, content, number) for channel, number, content in messages)


channels = st.builds(
    Channel,
    st.integers(0, 2**64 - 1),
    st.sampled_from(MESSAGES),
    st.integers(-(2**63), 2**63 - 1),
)
contents = st.binary(max_size=300) | st.integers(1, 3 * STAGING).map(lambda n: bytes([n % 251]) * n)
messages_of = st.lists(st.tuples(channels, st.integers(0, 2**64 - 1), contents), max_size=6)


@settings(max_examples=examples(150))
@given(messages_of, st.lists(st.integers(1, 2000), max_size=60), st.integers(1, 5000))
def test_any_split_of_the_stream_gives_the_same_messages(
    messages: list[tuple[Channel, int, bytes]], cuts: list[int], window: int
) -> None:
    collector = Collector(window)
    decoder = FrameDecoder(collector)
    feed(decoder, stream_of(messages), cuts)
    assert collector.found == [(c, f, len(content), content) for c, f, content in messages]
    assert decoder.at_boundary


@settings(max_examples=examples(60))
@given(messages_of, st.lists(st.integers(1, 300), max_size=60), st.integers(1, 3))
def test_a_message_that_is_refused_for_now_is_not_lost(
    messages: list[tuple[Channel, int, bytes]], cuts: list[int], refuse: int
) -> None:
    collector = Collector(refuse=refuse)
    feed(FrameDecoder(collector), stream_of(messages), cuts)
    assert collector.found == [(c, f, len(content), content) for c, f, content in messages]


@settings(max_examples=examples(80))
@given(
    st.lists(st.tuples(st.sampled_from(CONTROLS), st.binary(max_size=2000)), max_size=8),
    st.lists(st.integers(1, 300), max_size=40),
)
def test_control_frames_come_whole_between_the_frames_of_messages(
    controls: list[tuple[Kind, bytes]], cuts: list[int]
) -> None:
    content = bytes(range(256)) * 40
    channel = Channel(7, Kind.COLLECTIVE, 3)
    stream = b""
    for number, (kind, payload) in enumerate(controls):
        header = pack_header(Channel(number, kind, 0), length=len(payload), total=len(payload))
        stream += header + payload + stream_of([(channel, 5, content)])
    collector = Collector()
    feed(FrameDecoder(collector), stream, cuts)
    assert [(h.channel.kind, p) for h, p in collector.controls] == controls
    assert [h.channel.group for h, _ in collector.controls] == list(range(len(controls)))
    assert collector.found == [(channel, 5, len(content), content)] * len(controls)


@pytest.mark.parametrize("size", [0, 2 * MAX_PAYLOAD + 5])
def test_a_message_of_no_bytes_or_of_several_frames_comes_whole(size: int) -> None:
    message = (Channel(1, Kind.COLLECTIVE, 2), 9, bytes(size))
    collector = Collector()
    feed(FrameDecoder(collector), stream_of([message]), [10])
    assert collector.found == [(message[0], 9, size, bytes(size))]


def test_the_header_is_little_endian_and_fixed() -> None:
    header = pack_header(
        Channel(0x0102030405060708, Kind.POINT_TO_POINT, -2),
        fingerprint=3,
        length=4,
        total=6,
        offset=2,
    )
    assert HEADER_SIZE == len(header) == 52
    assert header[:12].hex() == "50484c580202000004000000"
    assert header[12:20].hex() == "0807060504030201"
    assert header[20:28].hex() == "feffffffffffffff"
    assert header[28:].hex() == "030000000000000006000000000000000200000000000000"


# What is refused ----------------------------------------------------------------------------


def patched(header: bytes, offset: int, form: str, value: int) -> bytes:
    patch = struct.pack("<" + form, value)
    return header[:offset] + patch + header[offset + len(patch) :]


PLAIN = pack_header(Channel(1, Kind.COLLECTIVE, 2), length=10, total=10)
CONTROL = pack_header(Channel(1, Kind.FAILURE, 0), length=10, total=10)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"HTTP" + PLAIN[4:], "HTTP"),
        (patched(PLAIN, 4, "B", 1), "version 1, this rank 2"),
        (patched(PLAIN, 5, "B", 0), "unknown kind 0"),
        (patched(PLAIN, 5, "B", 200), "unknown kind 200"),
        (patched(PLAIN, 6, "H", 1), "flags 1"),
        (patched(PLAIN, 8, "I", MAX_PAYLOAD + 1), f"{MAX_PAYLOAD + 1} bytes, more than the limit"),
        (patched(PLAIN, 8, "I", 2**32 - 1), "4294967295 bytes, more than the limit"),
        (patched(CONTROL, 8, "I", MAX_CONTROL + 1), f"{MAX_CONTROL + 1} bytes, more than"),
        (patched(PLAIN, 8, "I", 11), "leaves its message"),
        (patched(PLAIN, 36, "Q", 9), "leaves its message"),
        (patched(PLAIN, 44, "Q", 1), "leaves its message"),
        (patched(PLAIN, 44, "Q", 2**64 - 1), "leaves its message"),
    ],
)
def test_a_header_that_cannot_be_is_refused_before_anything_is_taken_for_it(
    header: bytes, words: str
) -> None:
    collector = Collector()
    with pytest.raises(FrameError, match=words):
        feed(FrameDecoder(collector), header, [1] * 51)
    assert collector.messages == []
    assert collector.controls == []


@settings(max_examples=examples(300))
@given(
    st.one_of(
        st.binary(max_size=400),
        st.tuples(st.binary(min_size=48, max_size=48), st.binary(max_size=100)).map(
            lambda parts: b"PHLX" + parts[0] + parts[1]
        ),
        st.tuples(st.integers(0, 51), st.integers(0, 255)).map(
            lambda p: PLAIN[: p[0]] + bytes([p[1]]) + PLAIN[p[0] + 1 :] + bytes(60)
        ),
    ),
    st.lists(st.integers(1, 60), max_size=20),
)
def test_bytes_of_any_kind_are_frames_or_a_frame_error(stream: bytes, cuts: list[int]) -> None:
    decoder = FrameDecoder(Collector(window=50))
    with suppress(FrameError):
        feed(decoder, stream, cuts)
