"""Bytes that nobody should send: the short form of `wire_fuzz.py`."""

from __future__ import annotations

import tracemalloc

import pytest
from wire_fuzz import fuzz

from phalanx.wire.frame import (
    MAX_CONTROL,
    STAGING,
    Channel,
    FrameDecoder,
    Header,
    Kind,
    pack_header,
)

ROUNDS = {"frames": 3000, "handshakes": 5000, "messages": 700}


@pytest.mark.parametrize("name", ROUNDS)
def test_whatever_comes_is_refused_or_understood(name: str) -> None:
    assert fuzz(name, 1, rounds=ROUNDS[name]) > ROUNDS[name]


class _Never:
    """Takes nothing, and is told of nothing."""

    def message(self, header: Header, whole: memoryview | None) -> bool:
        assert whole is None, "nothing whole has come"
        return False

    def control(self, header: Header, payload: bytes) -> None:
        raise AssertionError("nothing whole has come")


@pytest.mark.parametrize("kind", [Kind.TABLE, Kind.FAILURE, Kind.COLLECTIVE])
def test_what_is_announced_costs_nothing_before_it_comes(kind: Kind) -> None:
    """A header that promises as much as it may, and no byte of it."""
    header = pack_header(Channel(0, kind, 0), length=MAX_CONTROL, total=2**63)
    tracemalloc.start()
    try:
        decoder = FrameDecoder(_Never())
        space = decoder.space()
        space[: len(header)] = header
        decoder.received(len(header))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < STAGING + 4096
