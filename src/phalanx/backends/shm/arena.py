"""An arena: the memory that one rank shows to the others of its host, given out in blocks.

It grows by segments. Blocks that are given back are joined with their free neighbours and used
again, first fit; so their pages need not be made, and cleared, a second time. Beyond `KEPT` bytes
of free memory, pages go back to the system.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.backends.shm.segment import PAGE, Segment, tensor_at

SMALLEST = 64 << 20  # bytes of a segment; they cost nothing until they are written
LINE = 64  # bytes of a cache line, to which small blocks are aligned; large ones to pages
KEPT = 1 << 30  # bytes of free memory whose pages are kept
LARGE = 1 << 20  # bytes from which on pages are worth giving back


class Block(NamedTuple):
    """Some memory of an arena."""

    segment: int  # its number
    offset: int
    size: int


class Arena:
    """Gives out memory of its segments. All methods but `empty`'s tensors need the engine's lock.

    first     the segment that the neighbours have attached from the beginning; what lies there can
              be read after this process has ended. Its first `used` bytes are taken
    publish   called with the number of a new segment and the segment, before it is used
    """

    def __init__(self, first: Segment, used: int, publish: Callable[[int, Segment], None]) -> None:
        self.segments: list[Segment] = [first]
        self._publish = publish
        self._free = [Block(0, used, first.size - used)]  # by segment and offset
        self._free_bytes = 0
        # Tensors end whenever and wherever the garbage collector says; an append is safe there.
        self._returned: deque[Block] = deque()

    def take(self, size: int, *, after: int = -1) -> Block:
        """A block of at least `size` bytes, in a segment with a higher number than `after`.

        Raises OSError if the system has no memory for it.
        """
        self._collect()
        size = max(size, 1)
        unit = PAGE if size >= PAGE else LINE
        size = _up_to(unit, size)
        for place, free in enumerate(self._free):
            if free.size < size or free.segment <= after:
                continue
            start = _up_to(unit, free.offset)
            rest = free.offset + free.size - start - size
            if rest < 0:
                continue
            self._free_bytes = max(0, self._free_bytes - size)
            left = [Block(free.segment, start + size, rest)] if rest else []
            if start > free.offset:
                left.insert(0, Block(free.segment, free.offset, start - free.offset))
            self._free[place : place + 1] = left
            return Block(free.segment, start, size)
        self._grow(size)
        return self.take(size, after=after)

    def give_back(self, block: Block) -> None:
        """The block's memory may be used for something else."""
        self._returned.append(block)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in a block of its own, which goes back with its memory."""
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        block = self.take(count * dtype.itemsize, after=0)
        segment = self.segments[block.segment]
        lease = _Lease(self._returned, block, segment)
        return tensor_at(segment.start + block.offset, count, dtype, keeping=lease).view(shape)

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """The segment and offset of some memory, if it lies in this arena."""
        for number, segment in enumerate(self.segments):
            offset = address - segment.start
            if offset >= 0 and offset + size <= segment.size:
                return number, offset
        return None

    def close(self) -> None:
        """Nobody may attach the segments any more."""
        for segment in self.segments:
            segment.close()

    def _grow(self, size: int) -> None:
        segment = Segment.create(max(SMALLEST, -(-size // SMALLEST) * SMALLEST))
        number = len(self.segments)
        try:
            self._publish(number, segment)
        except BaseException:
            segment.close()
            raise
        self.segments.append(segment)
        self._free.append(Block(number, 0, segment.size))

    def _collect(self) -> None:
        """Take in the blocks that have come back."""
        while self._returned:
            block = self._returned.popleft()
            if self._free_bytes > KEPT and block.size >= LARGE:
                _give_pages_back(self.segments[block.segment], block)
            else:
                self._free_bytes += block.size
            self._put_in(block)

    def _put_in(self, block: Block) -> None:
        free = self._free
        place = len(free)
        while place and free[place - 1] > block:
            place -= 1
        if place < len(free) and _touch(block, free[place]):
            block = Block(block.segment, block.offset, block.size + free.pop(place).size)
        if place and _touch(free[place - 1], block):
            before = free[place - 1]
            free[place - 1] = Block(before.segment, before.offset, before.size + block.size)
        else:
            free.insert(place, block)


class _Lease:
    """Held by the memory of a tensor: gives the block back when the last tensor on it is gone."""

    __slots__ = ("_block", "_returned", "_segment")

    def __init__(self, returned: deque[Block], block: Block, segment: Segment) -> None:
        self._returned = returned
        self._block = block
        self._segment = segment

    def __del__(self) -> None:
        self._returned.append(self._block)


def _up_to(unit: int, number: int) -> int:
    return -(-number // unit) * unit


def _touch(first: Block, second: Block) -> bool:
    return first.segment == second.segment and first.offset + first.size == second.offset


def _give_pages_back(segment: Segment, block: Block) -> None:
    start = _up_to(PAGE, block.offset)
    stop = (block.offset + block.size) // PAGE * PAGE
    if stop > start:
        segment.map.madvise(mmap.MADV_REMOVE, start, stop - start)
