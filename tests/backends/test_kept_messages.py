"""What messages take that nobody has asked for is counted, and bounded, also if they are empty."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import torch
from clusters import CLUSTERS, PATIENCE, Cluster

import phalanx
from phalanx import Backend
from phalanx.core import matching
from phalanx.core.matching import MESSAGE, Matching
from phalanx.wire.frame import MAX_PAYLOAD, Channel, Kind

GROUP = 2**63 + 7
OVER_SOCKETS = [each for each in CLUSTERS if each.name in ("tcp", "shm")]


def keep(kept: Matching, messages: int, size: int, channels: int) -> None:
    for number in range(messages):
        channel = Channel(GROUP, Kind.POINT_TO_POINT, 2**30 + number % channels)
        kept.deliver(channel, 1, memoryview(bytes(size)), 2**62 + number)


@pytest.mark.checkered
@pytest.mark.parametrize("channels", [1, 50, 5000], ids="{} channels".format)
@pytest.mark.parametrize("size", [0, 1, 100, 3000], ids="{} bytes".format)
def test_a_kept_message_counts_for_the_memory_that_it_takes(size: int, channels: int) -> None:
    kept = Matching(lambda channel, peer: False)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        keep(kept, 5000, size, channels)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.95 * taken < kept.unexpected_bytes[1] < 1.35 * taken


def test_when_a_group_is_over_nothing_is_kept_of_it() -> None:
    kept = Matching(lambda channel, peer: False)
    keep(kept, 100, 1, 7)
    kept.forget_group(GROUP)
    assert (kept.unexpected_bytes[1], kept.unexpected) == (0, {})


def test_there_is_no_room_for_an_empty_message_beyond_the_limit() -> None:
    kept, taken = Matching(lambda channel, peer: False), 0
    keep(kept, 1, matching.UNEXPECTED_LIMIT - 100 * MESSAGE, 1)
    while kept.has_room(None, 1, 0):
        keep(kept, 1, 0, 1)
        taken += 1
    assert 90 <= taken < 100
    assert kept.has_room(None, 2, 0)


def wait_in_vain(backend: Backend, into: bytearray) -> None:
    """Wait for what never comes, and take what does, until there is no room for more."""
    deadline = time.monotonic() + PATIENCE
    said = ""
    while "takes no more" not in said:
        assert time.monotonic() < deadline, said
        with pytest.raises(phalanx.CollectiveTimeoutError) as info:
            backend.recv(into, 1, tag=4, timeout=0.5)
        said = str(info.value)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("ranks", OVER_SOCKETS, ids=str)
def test_small_messages_beyond_the_limit_wait_at_the_sender_and_all_come(
    ranks: Cluster, size: int, little_room: int
) -> None:
    """Their receives come late, those of the last ones first: there the limit is reached."""
    messages = 20_000

    def run(backend: Backend) -> int:
        if backend.rank == 1:
            for number in range(messages):
                backend.send(bytes([number % 251] * size), 0, tag=number % 3)
            backend.send(b"", 0, tag=9)
            return 0
        most, into = 0, bytearray(size)
        last = phalanx.irecv(torch.empty(0), backend, 1, tag=9)
        for number in range(messages):
            backend.recv(into, 1, tag=number % 3)
            assert into == bytes([number % 251] * size)
            most = max(most, backend.engine.matching.unexpected_bytes[1])
            if number == 100:
                wait_in_vain(backend, into)
        last.wait()
        assert backend.engine.matching.unexpected_bytes[1] == 0
        return most

    most = ranks.run(run, 2)[0]
    assert little_room - MAX_PAYLOAD < most <= little_room  # from there on it "takes no more"
