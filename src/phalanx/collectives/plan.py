"""A plan: a schedule bound to one size of tensor, made once and used for every call of that kind.

    schedule   Send(peer, chunk)  Combine(peer, chunk)     chunk numbers   (schedules/)
    plan       SendBytes(peer, start, stop) ...            byte ranges     (here)
    operation  the same, with memory and a sequence number                 (backends/)

Messages of no bytes are left out: both sides know that there is nothing to wait for. Where several
contributions to one chunk come in the same round, each is kept in a slot of the `stage`, a second
buffer, and all are folded in rank order when the round is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash

from phalanx.backends.base import Backend
from phalanx.backends.engine.rounds import ReceiveBytes, Round, SendBytes
from phalanx.collectives.chunks import chunk_ranges
from phalanx.collectives.memo import remembered
from phalanx.collectives.reduce_op import ReduceOp
from phalanx.collectives.schedules import COLLECTIVES, Combine, Schedule, Send, rooted
from phalanx.collectives.schedules.steps import Round as ChunkRound

WORK, STAGE = 0, 1  # the buffers of an operation


class Fold(NamedTuple):
    """Reduce elements [start, stop) of the work buffer with what is staged for them.

    `slots` has one entry for each contribution, in rank order: the byte in the stage where it
    begins, or None for this rank's own.
    """

    start: int
    stop: int
    slots: tuple[int | None, ...]


class Finish(NamedTuple):
    """Elements [start, stop) of the work buffer are reduced completely: divide them for a mean."""

    start: int
    stop: int


class Key(NamedTuple):
    """What a plan depends on, besides the group's rank and size."""

    collective: str
    algorithm: str
    shape: tuple[int, ...]  # of the work buffer
    dtype: torch.dtype
    op: ReduceOp | None = None
    root: int = 0


@dataclass(frozen=True)
class Plan:
    """One rank's part in a collective, for tensors of one shape and dtype."""

    program: tuple[Round | Fold | Finish, ...]
    stage_size: int  # bytes
    signature: str  # what it is besides the collective's name, for messages
    fingerprint: int  # the hash of both

    def bytes_sent(self) -> int:
        """The payload that this rank sends."""
        return sum(
            send.stop - send.start
            for step in self.program
            if isinstance(step, Round)
            for send in step.sends
        )


def plan_for(backend: Backend, key: Key) -> Plan:
    """The plan for this kind of call, made when it is needed first."""
    return remembered(backend, key, lambda: make_plan(key, backend.rank, backend.world_size))


def make_plan(key: Key, rank: int, size: int) -> Plan:
    """Bind the algorithm's schedule to byte ranges, for one rank."""
    row = COLLECTIVES[key.collective][key.algorithm]
    elements = 1
    for length in key.shape:
        elements *= length
    binder = _Binder(rank, chunk_ranges(elements, row.chunks(size)), key.dtype.itemsize)
    program: list[Round | Fold | Finish] = []
    if elements and size > 1:
        if row.reduce is not None:
            program += binder.bind(row.reduce(rank, size))
            if key.op is ReduceOp.MEAN:
                program += binder.finish(row.owned(rank, size))
        if row.spread is not None:
            spread = rooted(row.spread, key.root) if key.collective == "broadcast" else row.spread
            program += binder.bind(spread(rank, size))
    signature = _signature(key)
    fingerprint = xxhash.xxh3_64_intdigest(f"{key.collective} {signature}".encode())
    return Plan(tuple(program), binder.stage_size, signature, fingerprint)


def _signature(key: Key) -> str:
    what = f"{str(key.dtype).removeprefix('torch.')} {list(key.shape)}"
    op = f", {key.op.value}" if key.op is not None else ""
    root = f", root {key.root}" if key.collective == "broadcast" else ""
    return f"{what}{op}{root}, {key.algorithm}"


class _Binder:
    """Turns rounds over chunks into rounds over bytes."""

    def __init__(self, rank: int, ranges: list[tuple[int, int]], itemsize: int) -> None:
        self.rank = rank
        self.stage_size = 0
        self._ranges = ranges
        self._itemsize = itemsize

    def bind(self, schedule: Schedule) -> Iterator[Round | Fold]:
        for chunk_round in schedule:
            staged = _combined_more_than_once(chunk_round)
            sends: list[SendBytes] = []
            receives: list[ReceiveBytes] = []
            slots: dict[tuple[int, int], dict[int, int]] = {}
            used = 0
            for step in chunk_round:
                first, last = self._elements(step.chunk, step.count)
                start, stop = first * self._itemsize, last * self._itemsize
                if start == stop:
                    continue
                if isinstance(step, Send):
                    sends.append(SendBytes(step.peer, start, stop))
                elif isinstance(step, Combine) and step.chunk in staged:
                    size = stop - start
                    receives.append(ReceiveBytes(step.peer, used, used + size, STAGE))
                    slots.setdefault((first, last), {})[step.peer] = used
                    used += size
                else:
                    combine = isinstance(step, Combine)
                    receives.append(ReceiveBytes(step.peer, start, stop, WORK, combine))
            self.stage_size = max(self.stage_size, used)
            if sends or receives:
                yield Round(tuple(sends), tuple(receives))
            for (first, last), by_peer in slots.items():
                everyone: dict[int, int | None] = {**by_peer, self.rank: None}
                yield Fold(first, last, tuple(everyone[rank] for rank in sorted(everyone)))

    def finish(self, chunks: range) -> Iterator[Finish]:
        if len(chunks):
            start, stop = self._elements(chunks[0], len(chunks))
            if start < stop:
                yield Finish(start, stop)

    def _elements(self, chunk: int, count: int) -> tuple[int, int]:
        return self._ranges[chunk][0], self._ranges[chunk + count - 1][1]


def _combined_more_than_once(chunk_round: ChunkRound) -> set[int]:
    chunks = [step.chunk for step in chunk_round if isinstance(step, Combine)]
    return {chunk for chunk in chunks if chunks.count(chunk) > 1} if len(chunks) > 1 else set()
