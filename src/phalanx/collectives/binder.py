"""The binder: rounds over chunk numbers become rounds over bytes.

    schedule   Send(peer, chunk)  Combine(peer, chunk)     chunk numbers   (schedules/)
    binder     SendBytes(peer, start, stop) ...            byte ranges     (here)

Messages of no bytes are left out: both sides know that there is nothing to wait for. Where several
contributions to one chunk come in the same round, each is kept in a slot of the `stage`, a second
buffer, and all are folded in rank order when the round is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from phalanx.backends.engine.rounds import ReceiveBytes, Round, SendBytes
from phalanx.collectives.layout import STAGE, WORK, Layout
from phalanx.collectives.schedules import Combine, Schedule, Send
from phalanx.collectives.schedules.steps import Round as ChunkRound
from phalanx.collectives.schedules.steps import Step as ChunkStep


class Fold(NamedTuple):
    """Reduce elements [start, stop) of the work buffer with what is staged for them.

    `slots` has one entry for each contribution, in rank order: the byte in the stage where it
    begins, or None for this rank's own. `mean`: these are all contributions, and the result is
    divided by their number before it is rounded.
    """

    start: int
    stop: int
    slots: tuple[int | None, ...]
    mean: bool = False


class Finish(NamedTuple):
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

    def part(self, cut: int, length: int) -> _Move:
        """Of its bytes those from `cut` on, so many at most."""
        start = self.start + cut
        return self._replace(start=start, stop=min(self.stop, start + length))


class Binder:
    """Binds the schedules of one rank to a layout.

    fold_means              folds divide what they have reduced
    work_size, stage_size   bytes of these buffers that the rounds so far touch
    overwrites              whether they change the work buffer
    """

    def __init__(
        self, rank: int, layout: Layout, itemsize: int, *, fold_means: bool = False
    ) -> None:
        self.rank = rank
        self.work_size = 0
        self.stage_size = 0
        self.overwrites = False
        self._layout = layout
        self._itemsize = itemsize
        self._fold_means = fold_means

    def bind(self, schedule: Schedule, piece: int | None = None) -> Iterator[Round | Fold]:
        """The rounds of a schedule, each with the folds that it leaves to do.

        piece   bytes: longer messages are cut, and a round is several, so that the stage stays
                small and is folded while it is in a cache. The same on every rank
        """
        for chunk_round in schedule:
            staged = _combined_more_than_once(chunk_round)
            moves = [move for step in chunk_round if (move := self._placed(step, staged))]
            longest = max((move.stop - move.start for move in moves), default=0)
            for cut in range(0, longest, piece or longest or 1):
                yield from self._round([move.part(cut, piece or longest) for move in moves])

    def _placed(self, step: ChunkStep, staged: set[int]) -> _Move | None:
        """Where the bytes of a step lie, if there are any."""
        buffer, first, last = self._layout.place(step.chunk, step.count)
        start, stop = first * self._itemsize, last * self._itemsize
        if start == stop:
            return None
        if buffer == WORK:
            self.work_size = max(self.work_size, stop)
        if not isinstance(step, Send):
            self.overwrites = True
        return _Move(type(step), step.peer, start, stop, buffer, step.chunk in staged)

    def _round(self, moves: list[_Move]) -> Iterator[Round | Fold]:
        """One round, and the folds after it."""
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
            yield Fold(first, last, in_order, self._fold_means)

    def finish(self, chunks: range) -> Iterator[Finish]:
        """What is left to do with these chunks, if they are a mean."""
        if len(chunks):
            _, start, stop = self._layout.place(chunks[0], len(chunks))
            if start < stop:
                self.overwrites = True
                yield Finish(start, stop)


def _combined_more_than_once(chunk_round: ChunkRound) -> set[int]:
    chunks = [step.chunk for step in chunk_round if isinstance(step, Combine)]
    return {chunk for chunk in chunks if chunks.count(chunk) > 1} if len(chunks) > 1 else set()
