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

    def bind(self, schedule: Schedule) -> Iterator[Round | Fold]:
        """The rounds of a schedule, each with the folds that it leaves to do."""
        for chunk_round in schedule:
            staged = _combined_more_than_once(chunk_round)
            sends: list[SendBytes] = []
            receives: list[ReceiveBytes] = []
            slots: dict[tuple[int, int], dict[int, int]] = {}
            used = 0
            for step in chunk_round:
                buffer, first, last = self._layout.place(step.chunk, step.count)
                start, stop = first * self._itemsize, last * self._itemsize
                if start == stop:
                    continue
                if buffer == WORK:
                    self.work_size = max(self.work_size, stop)
                if isinstance(step, Send):
                    sends.append(SendBytes(step.peer, start, stop, buffer))
                    continue
                self.overwrites = True
                if isinstance(step, Combine) and step.chunk in staged:
                    size = stop - start
                    receives.append(ReceiveBytes(step.peer, used, used + size, STAGE))
                    slots.setdefault((first, last), {})[step.peer] = used
                    used += size
                else:
                    combine = isinstance(step, Combine)
                    receives.append(ReceiveBytes(step.peer, start, stop, buffer, combine))
            self.stage_size = max(self.stage_size, used)
            if sends or receives:
                yield Round(tuple(sends), tuple(receives))
            for (first, last), by_peer in slots.items():
                everyone: dict[int, int | None] = {**by_peer, self.rank: None}
                in_order = tuple(everyone[rank] for rank in sorted(everyone))
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
