"""The ledger: where one rank writes down, for the others of its host, what memory it shows them.

It lies at the beginning of a rank's first segment, which all neighbours attach when they meet, and
has a fixed form; only its owner writes in it:

    word    0          1 while this rank sleeps, and wants its bell rung when something has come
            1          how often a window was entered, or taken out
            2          how many entries for windows have been used
            8 ...      segments: number of the file, size
            ...        windows: group, segment + 1 (0: nothing here), offset

What is published is written before what says that it is there (fence.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.backends.shm.fence import make_order
from phalanx.backends.shm.segment import Segment
from phalanx.errors import BackendUnavailableError

ASLEEP, EDITION, USED = 0, 1, 2
SEGMENTS, WINDOWS = 1024, 4096  # entries at most; a ledger has room for them
_SEGMENT, _WINDOW = 2, 3  # words an entry
_FIRST_SEGMENT = 8
_FIRST_WINDOW = _FIRST_SEGMENT + SEGMENTS * _SEGMENT
SIZE = 128 << 10  # bytes of a ledger
# Bytes behind it and the lanes, which cost nothing until they are written: windows of a hundred
# groups and their staging memory, so that they are found when this rank has ended.
ROOM = 1 << 30


class Ledger:
    """This rank's own, at the beginning of a segment; behind it come `lanes` bytes for these."""

    def __init__(self, lanes: int = 0) -> None:
        self.segment = Segment.create(SIZE + lanes + ROOM)
        self.words = self.segment.words
        self._entries: dict[int, int] = {}  # group -> its entry's first word
        self._order = make_order()

    def add_segment(self, number: int, segment: Segment) -> None:
        """Others may attach it from now on."""
        if number >= SEGMENTS:
            raise BackendUnavailableError(
                f"this rank has {SEGMENTS} pieces of shared memory, and cannot have more: free "
                "tensors of backend.empty(), or make fewer, larger ones"
            )
        entry = _FIRST_SEGMENT + number * _SEGMENT
        self.words[entry], self.words[entry + 1] = segment.fd, segment.size
        self._order()  # before a tensor in it is shown

    def add_window(self, group: int, segment: int, offset: int) -> None:
        """Others may look through it from now on."""
        words = self.words
        taken = set(self._entries.values())
        places = range(_FIRST_WINDOW, _FIRST_WINDOW + WINDOWS * _WINDOW, _WINDOW)
        entry = next((place for place in places if place not in taken), None)
        if entry is None:
            raise BackendUnavailableError(
                f"this rank has {WINDOWS} groups with shared memory: close() those that are not "
                "needed any more"
            )
        self._entries[group] = entry
        words[entry], words[entry + 2] = group, offset
        words[entry + 1] = segment + 1
        words[USED] = max(words[USED], (entry - _FIRST_WINDOW) // _WINDOW + 1)
        self._order()
        words[EDITION] += 1

    def remove_window(self, group: int) -> None:
        """Nobody looks through it any more."""
        self.words[self._entries.pop(group) + 1] = 0
        self._order()
        self.words[EDITION] += 1


class LedgerOfPeer:
    """Another rank's, to be read."""

    def __init__(self, process: int, fd: int) -> None:
        self._process = process
        first = Segment.attach(process, fd)
        self.words = first.words
        self._segments = {0: first}
        self._windows: dict[int, tuple[int, int]] = {}
        self._edition = 0
        self._order = make_order()

    def segment(self, number: int) -> Segment:
        """One of its segments. Raises OSError if it cannot be attached."""
        segment = self._segments.get(number)
        if segment is None:
            entry = _FIRST_SEGMENT + number * _SEGMENT
            segment = Segment.attach(self._process, self.words[entry])
            if segment.size != self.words[entry + 1]:
                raise FileNotFoundError(f"segment {number} of process {self._process} is gone")
            self._segments[number] = segment
        return segment

    def window(self, group: int) -> tuple[int, int] | None:
        """Segment and offset of its window for a group, if it has one by now."""
        while self.words[EDITION] != self._edition:
            self._edition = self.words[EDITION]
            self._order()
            self._windows = dict(self._entries())
        return self._windows.get(group)

    def _entries(self) -> Iterator[tuple[int, tuple[int, int]]]:
        words = self.words
        for number in range(words[USED]):
            entry = _FIRST_WINDOW + number * _WINDOW
            segment = words[entry + 1]  # once: its owner may take it out between two looks
            if segment:
                yield words[entry], (segment - 1, words[entry + 2])
