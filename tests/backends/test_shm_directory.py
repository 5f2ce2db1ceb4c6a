"""The directory: what one rank writes there, the others read, whenever they look."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import BackendUnavailableError
from phalanx.transport.shm.directory import (
    CONTROL_BLOCKS,
    EDITION,
    SEGMENTS,
    USED,
    WAKEUP,
    Directory,
    LocalPeer,
)
from phalanx.transport.shm.segments import Segment

ME = os.getpid()


@pytest.fixture
def directory() -> Iterator[Directory]:
    directory = Directory()
    yield directory
    directory.segment.close()


def peer_of(directory: Directory) -> LocalPeer:
    """A reader of it, of the same job, with a pipe that nobody is woken by."""
    pipe = os.pipe()
    directory.words[WAKEUP] = pipe[1]
    peer = LocalPeer(1, ME, directory.segment.fd, pipe[1], directory)
    peer.close()
    for end in pipe:
        os.close(end)
    return peer


def test_what_one_side_writes_the_other_reads(directory: Directory) -> None:
    peer = peer_of(directory)
    assert peer.control(7) is None
    directory.add_control_block(7, 3, 4096)
    directory.add_control_block(0, 0, 64)
    assert peer.control(7) == (3, 4096)
    assert peer.control(0) == (0, 64)  # 0 is a group, a segment and an offset like any other
    directory.remove_control_block(7)
    assert peer.control(7) is None
    assert peer_of(directory).control(0) == (0, 64)  # and who comes later


def test_groups_are_known_by_64_bits(directory: Directory) -> None:
    peer = peer_of(directory)
    directory.add_control_block(2**64 - 1, 1, 2**40)
    assert peer.control(2**64 - 1) == (1, 2**40)


def test_a_segment_is_attached_once_and_is_the_same_memory(directory: Directory) -> None:
    segment = Segment.create(1 << 16)
    directory.add_segment(1, segment)
    peer = peer_of(directory)
    there = peer[1]
    assert there is peer[1]
    segment.words[5] = 42
    assert (there.words[5], there.size) == (42, 1 << 16)
    there.words[6] = 43
    assert segment.words[6] == 43
    assert there.start != segment.start
    segment.close()
    assert there.words[5] == 42  # whoever has attached it keeps it
    with pytest.raises(OSError):
        peer_of(directory)[1]


def test_a_segment_that_was_never_published_is_not_found(directory: Directory) -> None:
    with pytest.raises(OSError):
        peer_of(directory)[2]


def test_a_file_that_is_not_the_memory_of_the_ledger_is_not_believed(directory: Directory) -> None:
    segment = Segment.create(1 << 16)
    directory.add_segment(1, segment)
    segment.close()
    other = Segment.create(1 << 12)  # takes the same number
    try:
        assert other.fd == directory.words[8 + 2]
        with pytest.raises(OSError):
            peer_of(directory)[1]
    finally:
        other.close()


changes = st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.booleans()), max_size=40)


@settings(max_examples=examples(50))
@given(changes)
def test_a_reader_that_looks_now_and_then_always_sees_what_is_there(
    changes: list[tuple[bool, int, bool]],
) -> None:
    directory = Directory()
    reader = peer_of(directory)
    there: dict[int, tuple[int, int]] = {}
    for number, (adds, group, looks) in enumerate(changes):
        if adds and group not in there:
            there[group] = (number % 3, 64 * number)
            directory.add_control_block(group, *there[group])
        elif group in there:
            del there[group]
            directory.remove_control_block(group)
        if looks:
            assert [reader.control(one) for one in range(7)] == [there.get(n) for n in range(7)]
    assert directory.words[USED] <= 7  # entries are used again
    directory.segment.close()


class Watched:
    """The words of a directory, which the other side changes between two looks."""

    def __init__(self, words: memoryview, at: int, change: Callable[[], None]) -> None:
        self._words = words
        self._left = at
        self._change = change

    def __getitem__(self, place: int) -> int:
        if self._left == 0:
            self._change()
        self._left -= 1
        return self._words[place]


class HalfWay:
    """The words of a directory whose owner is stopped before its nth change."""

    def __init__(self, words: memoryview, changes: int) -> None:
        self._words = words
        self._left = changes

    def __getitem__(self, place: int) -> int:
        return self._words[place]

    def __setitem__(self, place: int, value: int) -> None:
        if self._left == 0:
            raise InterruptedError
        self._left -= 1
        self._words[place] = value


BEFORE = {1: (0, 64), 2: (1, 128)}
AFTER = {1: (0, 64), 3: (2, 192)}


@pytest.mark.parametrize("writes", range(9))
def test_what_changes_while_it_is_read_is_read_again_or_not_seen(writes: int) -> None:
    """Between any two looks of a reader, the owner begins to take out group 2 and to put 3 in its
    entry, and comes as far as its nth change; then the reader goes on.
    """
    for at in range(20):
        for wanted in (1, 2, 3):
            directory = Directory()
            reader = peer_of(directory)
            for group, place in BEFORE.items():
                directory.add_control_block(group, *place)

            def change(directory: Directory = directory) -> None:
                directory.words = HalfWay(directory.segment.words, writes)  # type: ignore[assignment]
                with suppress(InterruptedError):
                    directory.remove_control_block(2)
                    directory.add_control_block(3, *AFTER[3])

            reader.words = Watched(reader.words, at, change)  # type: ignore[assignment]
            seen = reader.control(wanted)
            directory.segment.close()
            assert seen in (BEFORE.get(wanted), AFTER.get(wanted)), at


def test_a_table_that_is_full_says_what_to_do(directory: Directory) -> None:
    segment = Segment.create(4096)
    try:
        directory.add_segment(SEGMENTS - 1, segment)
        with pytest.raises(BackendUnavailableError, match=rf"{SEGMENTS} pieces .* free tensors"):
            directory.add_segment(SEGMENTS, segment)
    finally:
        segment.close()
    for group in range(CONTROL_BLOCKS):
        directory._entries[group] = 8 + 2 * SEGMENTS + 3 * group
    with pytest.raises(BackendUnavailableError, match=rf"{CONTROL_BLOCKS} groups .* close\(\)"):
        directory.add_control_block(CONTROL_BLOCKS, 0, 64)
    before = directory.words[EDITION]
    directory.remove_control_block(17)
    directory.add_control_block(CONTROL_BLOCKS, 0, 64)
    assert directory.words[EDITION] == before + 2
    assert peer_of(directory).control(CONTROL_BLOCKS) == (0, 64)
