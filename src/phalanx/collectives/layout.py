"""The places of a collective's chunks in this rank's memory, and its rounds over these bytes.

    collective              a rank's memory                                       layout
    with one tensor         all chunks, in order                                  cut
    gather, scatter         on the root all chunks; elsewhere its own one, and    cut, held
                            those that pass through on their way
    all to all              its row of the chunks in one buffer, its column in    exchanged
                            another

Places are in elements; runs of chunks that a schedule moves as one message lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from phalanx.collectives.schedules import Combine, Schedule, Send
from phalanx.collectives.schedules.steps import Round as ChunkRound
from phalanx.collectives.schedules.steps import Step as ChunkStep
from phalanx.core.steps import ReceiveBytes, Round, SendBytes
from phalanx.errors import InvalidWorldSizeError

WORK, STAGE, SOURCE = 0, 1, 1  # an operation's buffers; it has either a stage or a source

Range = tuple[int, int]  # (start, stop)


class Place(NamedTuple):
    """Elements [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int


Layout: TypeAlias = Callable[[int, int], Place]
"""Of (chunk, count): where the chunks [chunk, chunk + count) are."""


def cut(ranges: Sequence[Range], *, buffer: int = WORK) -> Layout:
    """A buffer is the whole tensor, cut into these ranges."""
    return lambda chunk, count: Place(buffer, ranges[chunk][0], ranges[chunk + count - 1][1])


def held(rank: int, size: int, length: int) -> Layout:
    """The work buffer begins with this rank's chunk; the others follow in a circle.

    A rank of a gather or scatter below the root has to do with a run of the circle only, its own
    subtree, so it needs no more memory than for that. Each chunk has `length` elements.
    """

    def place(chunk: int, count: int) -> Place:
        first = (chunk - rank) % size
        return Place(WORK, first * length, (first + count) * length)

    return place


def exchanged(rank: int, outgoing: Sequence[Range], incoming: Sequence[Range]) -> Layout:
    """Chunk p*s + d is, on rank s, slice d of the source; on rank d, slice s of the work buffer.

    outgoing, incoming   the places of the slice for each rank, and of the slice from each rank
    """

    def place(chunk: int, count: int) -> Place:
        assert count == 1
        src, dst = divmod(chunk, len(outgoing))
        if src == rank:
            return Place(SOURCE, *outgoing[dst])
        assert dst == rank
        return Place(WORK, *incoming[src])

    return place


def ranges_of(lengths: Sequence[int]) -> list[Range]:
    """Return ranges of these lengths, one after the other."""
    return list(pairwise(accumulate(lengths, initial=0)))


# ------------------------------------------------------------------------------
# Cutting a length into chunks: as evenly as possible, in order, without a rest.


def chunk_ranges(total: int, parts: int) -> list[Range]:
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


# ------------------------------------------------------------------------------
# The binder: rounds over chunk numbers become rounds over bytes.
#
# Messages of no bytes are left out: both sides know that there is nothing to wait for. If several
# contributions to one chunk arrive in the same round, each is kept in a slot of the staging buffer,
# and all are reduced in rank order when the round is complete.


class ReduceStaged(NamedTuple):
    """Reduce elements [start, stop) of the work buffer with their staged contributions.

    `slots` has one entry for each contribution, in rank order: the byte in the stage where it
    begins, or None for this rank's own.
    """

    start: int
    stop: int
    slots: tuple[int | None, ...]


class Divide(NamedTuple):
    """Elements [start, stop) of the work buffer are reduced completely: divide them for a mean."""

    start: int
    stop: int


class _Move(NamedTuple):
    """A step of a schedule, over bytes."""

    kind: type[ChunkStep]
    peer: int
    start: int
    stop: int
    buffer: int
    staged: bool  # one of several contributions to its chunk

    def part(self, first: int, length: int) -> _Move:
        """Return a part of it: `length` bytes at most, from byte `first` on."""
        start = self.start + first
        return self._replace(start=start, stop=min(self.stop, start + length))


class Binder:
    """Binds the schedules of one rank to a layout.

    work_size, stage_size   bytes of these buffers that the rounds so far touch
    overwrites              whether they change the work buffer
    """

    def __init__(self, rank: int, layout: Layout, itemsize: int) -> None:
        self.rank = rank
        self.work_size = 0
        self.stage_size = 0
        self.overwrites = False
        self._layout = layout
        self._itemsize = itemsize

    def bind(self, schedule: Schedule, piece: int | None = None) -> Iterator[Round | ReduceStaged]:
        """Return the rounds of a schedule, each followed by its local reductions.

        piece   bytes: longer messages are cut, and a round is several, so that the stage stays
                small and is reduced while it is in a cache. The same on every rank
        """
        for chunk_round in schedule:
            staged = _combined_more_than_once(chunk_round)
            moves = [move for step in chunk_round if (move := self._placed(step, staged))]
            longest = max((move.stop - move.start for move in moves), default=0)
            for first in range(0, longest, piece or longest or 1):
                yield from self._round([move.part(first, piece or longest) for move in moves])

    def _placed(self, step: ChunkStep, staged: set[int]) -> _Move | None:
        """Return the place of a step's bytes, if there are any."""
        buffer, first, last = self._layout(step.chunk, step.count)
        start, stop = first * self._itemsize, last * self._itemsize
        if start == stop:
            return None
        if buffer == WORK:
            self.work_size = max(self.work_size, stop)
        if not isinstance(step, Send):
            self.overwrites = True
        return _Move(type(step), step.peer, start, stop, buffer, step.chunk in staged)

    def _round(self, moves: list[_Move]) -> Iterator[Round | ReduceStaged]:
        """Return one round, and the local reductions after it."""
        sends: list[SendBytes] = []
        receives: list[ReceiveBytes] = []
        slots: dict[tuple[int, int], dict[int, int]] = {}
        used = 0
        for kind, peer, start, stop, buffer, staged in moves:
            if start >= stop:
                continue
            if kind is Send:
                sends.append(SendBytes(peer, start, stop, buffer))
            elif kind is Combine and staged:
                receives.append(ReceiveBytes(peer, used, used + stop - start, STAGE))
                slots.setdefault((start, stop), {})[peer] = used
                used += stop - start
            else:
                receives.append(ReceiveBytes(peer, start, stop, buffer, kind is Combine))
        self.stage_size = max(self.stage_size, used)
        if sends or receives:
            yield Round(tuple(sends), tuple(receives))
        for (start, stop), by_peer in slots.items():
            everyone: dict[int, int | None] = {**by_peer, self.rank: None}
            in_order = tuple(everyone[rank] for rank in sorted(everyone))
            first, last = start // self._itemsize, stop // self._itemsize
            yield ReduceStaged(first, last, in_order)

    def finish(self, chunks: range) -> Iterator[Divide]:
        """Return the division of these chunks, if they are a mean."""
        if len(chunks):
            _, start, stop = self._layout(chunks[0], len(chunks))
            if start < stop:
                self.overwrites = True
                yield Divide(start, stop)


def _combined_more_than_once(chunk_round: ChunkRound) -> set[int]:
    chunks = [step.chunk for step in chunk_round if isinstance(step, Combine)]
    return {chunk for chunk in chunks if chunks.count(chunk) > 1} if len(chunks) > 1 else set()
