"""Where the chunks of a collective lie in this rank's memory.

    collective              a rank's memory                                       layout
    with one tensor         all chunks, in order                                  Cut
    gather, scatter         on the root all chunks; elsewhere its own one, and    Cut, Held
                            those that pass through on their way
    all to all              its row of the chunks in one buffer, its column in    Exchanged
                            another

Places are in elements; runs of chunks that a schedule moves as one message lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from phalanx.errors import InvalidWorldSizeError

WORK, STAGE, SOURCE = 0, 1, 1  # an operation's buffers; it has either a stage or a source

Range = tuple[int, int]  # (start, stop)


class Place(NamedTuple):
    """Elements [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int


class Layout(Protocol):
    """Says where chunks are."""

    def place(self, chunk: int, count: int) -> Place:
        """Where the chunks [chunk, chunk + count) are."""
        ...


class Cut:
    """A buffer is the whole tensor, cut into these ranges."""

    def __init__(self, ranges: Sequence[Range], *, buffer: int = WORK) -> None:
        self._ranges = ranges
        self._buffer = buffer

    def place(self, chunk: int, count: int) -> Place:
        """See `Layout`."""
        return Place(self._buffer, self._ranges[chunk][0], self._ranges[chunk + count - 1][1])


class Held:
    """The work buffer begins with this rank's chunk; the others follow in a circle.

    A rank of a gather or scatter below the root has to do with a run of the circle only, its own
    subtree, so it needs no more memory than for that.
    """

    def __init__(self, rank: int, size: int, length: int) -> None:
        self._rank = rank
        self._size = size
        self._length = length  # elements of each chunk

    def place(self, chunk: int, count: int) -> Place:
        """See `Layout`."""
        first = (chunk - self._rank) % self._size
        return Place(WORK, first * self._length, (first + count) * self._length)


class Exchanged:
    """Chunk p*s + d is, on rank s, slice d of the source; on rank d, slice s of the work buffer."""

    def __init__(self, rank: int, outgoing: Sequence[Range], incoming: Sequence[Range]) -> None:
        self._rank = rank
        self._outgoing = outgoing  # where the slice for each rank is
        self._incoming = incoming  # where the slice of each rank goes

    def place(self, chunk: int, count: int) -> Place:
        """See `Layout`."""
        assert count == 1
        src, dst = divmod(chunk, len(self._outgoing))
        if src == self._rank:
            return Place(SOURCE, *self._outgoing[dst])
        assert dst == self._rank
        return Place(WORK, *self._incoming[src])


def ranges_of(lengths: Sequence[int]) -> list[Range]:
    """Ranges of these lengths, one after the other."""
    return list(pairwise(accumulate(lengths, initial=0)))


# ------------------------------------------------------------------------------
# Cutting a length into chunks: as evenly as possible, in order, without a rest.


def chunk_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into `parts` runs (start, end), whose lengths differ by one at most.

    Part i is [i * total // parts, (i + 1) * total // parts). With fewer elements than parts, some
    are empty:

        total 10, parts 4    [0, 2) [2, 5) [5, 7) [7, 10)
        total 2, parts 4     [0, 0) [0, 1) [1, 1) [1, 2)

    Raises InvalidWorldSizeError if there are no parts to cut into, ValueError if `total` is
    negative.
    """
    if parts < 1:
        raise InvalidWorldSizeError(f"cannot cut into {parts} parts: 1 or more are needed")
    if total < 0:
        raise ValueError(f"cannot cut {total} elements: a length is 0 or more")
    return [(i * total // parts, (i + 1) * total // parts) for i in range(parts)]
