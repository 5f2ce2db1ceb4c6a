"""Collectives of tensors on a device: piece by piece, in page-locked memory of this host.

    to host    0   1       2       3                  on the device's stream of copies
    collective     0       1       2       3          on host memory, as for tensors of the CPU
    to device          0       1       2       3      on the stream of copies, behind `to host`

A piece is the same part of each slice of the tensor, and has a staging buffer of `STAGING_BYTES`:
two take turns. So a collective takes 8 MiB of host memory, whatever the size of the tensor, and
each byte that a rank gives or gets crosses the bus once. All ranks cut alike.

It is one collective for the other ranks, whose fingerprint says that it is on a device: they have
to give tensors on a device, too. The pieces use the algorithm that is right for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from phalanx.core.device import Copied, Event, HostCopies
from phalanx.core.posted import Combine
from phalanx.core.steps import Program


class Slices(NamedTuple):
    """The form of a collective's input and result: a slice for each rank, or one tensor."""

    source: bool = False
    out: bool = False


SLICES: Mapping[str, Slices] = MappingProxyType(
    {
        "all_reduce": Slices(),
        "reduce": Slices(),
        "broadcast": Slices(),
        "all_gather": Slices(out=True),
        "gather": Slices(out=True),
        "scatter": Slices(source=True),
        "reduce_scatter": Slices(source=True),
        "all_to_all": Slices(source=True, out=True),
    }
)

LINE = 64  # bytes, to which pieces are rounded down

Bound: TypeAlias = (
    "tuple[Iterable[Program], Sequence[memoryview], Combine | None, Callable[[], object]]"
)
"""A collective on host memory: its steps, their buffers, what reduces into these; and its end."""


class StagedCollective:
    """One collective of one rank on tensors of one device.

    source, out   its input, and memory for its result, as in `NativeCall`
    shape         of the tensor that is cut: the larger one of the two
    bind          binds the collective of a piece to host memory: (source, out, shape)
    buffers       the memory of the round that comes next: changes from piece to piece
    """

    def __init__(
        self,
        copies: HostCopies,
        collective: str,
        source: Tensor | None,
        out: Tensor | None,
        *,
        rank: int,
        size: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        bind: Callable[[Tensor | None, Tensor | None, tuple[int, ...]], Bound],
    ) -> None:
        self.buffers: list[memoryview] = []
        self._combine: Combine | None = None
        self._copies = copies
        self._bind = bind
        self._dtype = dtype
        slices = SLICES[collective]
        self._rows_given = size if slices.source else 1
        self._rows = size if slices.out else 1  # of the result
        # The input lies in the place of its result, or in its part of that, or behind it.
        behind, own = self._rows if slices.source else 0, rank if slices.out else 0
        self._first_given = behind or own
        rows = behind + self._rows_given if behind else self._rows
        self._length = prod(shape) // max(self._rows_given, self._rows)  # elements of a slice
        self._size = max(copies.staging_bytes, rows * dtype.itemsize)
        most = self._size // rows // dtype.itemsize
        line = LINE // dtype.itemsize
        self._piece = most // line * line if most >= line else most
        self._source = self._cut(source, self._rows_given)
        self._out = self._cut(out, self._rows)
        self._caller = copies.caller()
        self._done: Event | None = None

    def _cut(self, tensor: Tensor | None, rows: int) -> Tensor | None:
        """Return the bytes of a contiguous tensor, a row for each slice."""
        if tensor is None:
            return None
        flat = tensor.as_strided((tensor.numel(),), (1,))  # of one element a stride may be anything
        return flat.view(torch.uint8).view(rows, self._length * self._dtype.itemsize)

    def order(self) -> None:
        """Let later work of this thread's current stream wait for the result."""
        if self._done is not None:
            self._copies.order(self._done)

    def combine(self, buffer: int, start: int, block: memoryview) -> None:
        """Reduce a block that came into a buffer of the piece that is under way."""
        assert self._combine is not None
        self._combine(buffer, start, block)

    def steps(self) -> Iterator[Program]:
        """Yield this rank's part. In the end the caller's stream waits for copies under way."""
        copies = self._copies
        pieces = [
            (first, min(first + self._piece, self._length))
            for first in range(0, self._length, self._piece)
        ]
        stages = [copies.borrow(self._size) for _ in pieces[:2]]
        try:
            loaded = self._load(stages[0], *pieces[0], after=self._caller.event)
            for number, (first, last) in enumerate(pieces):
                stage, following = stages[number % 2], loaded
                if number + 1 < len(pieces):
                    following = self._load(stages[1 - number % 2], *pieces[number + 1])
                yield Copied(loaded)
                yield from self._on_host(stage.view(self._dtype), last - first)
                self._store(stage, first, last)
                loaded = following
        finally:
            self._done = copies.queue(())
            copies.order(self._done, self._caller.stream)
            self.buffers.clear()
            for stage in stages:
                copies.give_back(stage)

    def _on_host(self, stage: Tensor, length: int) -> Iterator[Program]:
        """Yield the collective of one piece: so many elements of each slice."""
        start, rows = self._first_given * length, max(self._rows_given, self._rows)
        source = stage[start : start + self._rows_given * length]
        out = stage[: self._rows * length]
        steps, buffers, self._combine, finish = self._bind(
            source if self._source is not None else None,
            out if self._out is not None else None,
            (rows * length,),
        )
        self.buffers[:] = buffers
        yield from steps
        finish()

    def _load(self, stage: Tensor, first: int, last: int, after: Event | None = None) -> Event:
        """Copy this rank's input of a piece to its buffer; return the event at the copies' end."""
        places = self._places(stage, self._source, self._first_given, first, last)
        return self._copies.queue(places, after)

    def _store(self, stage: Tensor, first: int, last: int) -> None:
        """Copy a piece of the result to the device."""
        places = self._places(stage, self._out, 0, first, last)
        self._copies.queue([(row, place) for place, row in places])

    def _places(
        self, stage: Tensor, slices: Tensor | None, before: int, first: int, last: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each slice's places of elements `first` to `last`: in the buffer, on the device.

        before   number of slices before these in the buffer
        """
        if slices is None:
            return []
        start, stop = first * self._dtype.itemsize, last * self._dtype.itemsize
        place = stage[before * (stop - start) : (before + len(slices)) * (stop - start)]
        rows = place.view(len(slices), stop - start).unbind()
        return list(zip(rows, slices[:, start:stop].unbind(), strict=True))
