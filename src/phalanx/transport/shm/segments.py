"""A segment: memory that several processes of one host have mapped.

It is a file without a name (memfd), so nothing has to be removed: when the last process that has it
mapped is gone, however it ended, the memory is free. Others open it by way of the owner's process,
`/proc/<process>/fd/<number>`, which the system lets only the same user do, and root.

A rank only sends that process and number. So nothing is opened before it is known to be memory of
Phalanx's or a pipe, of a process of this user's. Memory is sealed: its size stays. A process that
reads memory that another one has cut off dies of SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, UntypedStorage
from typing_extensions import override

from phalanx.core.steps import Place, Source
from phalanx.wire.memory import tensor_at

PAGE = mmap.PAGESIZE


class Segment:
    """Mapped memory. It stays mapped for as long as a tensor in it is alive.

    fd       the number of the file in the owner's process; -1 for those who attached it
    map      the mapping itself
    words    the memory as 64-bit numbers
    start    its address in this process
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.map = mmap.mmap(fd, size)
        self.words = memoryview(self.map).cast("Q")
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def create(cls, size: int) -> Segment:
        """Create memory of so many bytes, all zero. It takes pages only when they are written."""
        _system_mmap()  # a child that was forked should not have to look it up
        fd = _create(size)
        try:
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, process: int, fd: int, size: int) -> Segment:
        """Map a segment of another process. Raises OSError if that cannot be, or may not."""
        here = open_of(process, fd, MEMORY)
        try:
            if os.fstat(here).st_size != size:
                raise FileNotFoundError(errno.ENOENT, f"memory of process {process} is gone")
            segment = cls(here, size)
        finally:
            os.close(here)
        segment.fd = -1
        return segment

    def detach(self) -> None:
        """Keep a forked child's writes to itself. It reads the same bytes as before."""
        both, fixed_no_reserve = mmap.PROT_READ | mmap.PROT_WRITE, 0x4010
        how = mmap.MAP_PRIVATE | fixed_no_reserve
        if self.fd >= 0:
            _system_mmap()(self.start, self.size, both, how, self.fd, 0)

    def close(self) -> None:
        """Let nobody attach it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_NAME = "phalanx"
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, _SHRINK, _GROW, which Python has on Linux only

# The files of another process to open: type, beginning of the name, and flags.
MEMORY = stat.S_ISREG, f"/memfd:{_NAME} ", os.O_RDWR
PIPE = stat.S_ISFIFO, "pipe:", os.O_WRONLY | os.O_NONBLOCK


def _create(size: int) -> int:
    """Create a file without a name, of so many bytes for ever."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_of(process: int, fd: int, kind: tuple[Callable[[int], bool], str, int]) -> int:
    """Open a file that a rank of this host has open in its process: `MEMORY` or a `PIPE`.

    OSError if it is something else, or the process is another user's.
    """
    is_kind, begin, flags = kind
    path = os.open(f"/proc/{process}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)  # does nothing to a file
    try:
        owner, name = os.stat(f"/proc/{process}").st_uid, os.readlink(f"/proc/self/fd/{path}")
        if owner not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, f"process {process} is user {owner}'s")
        if is_kind(os.fstat(path).st_mode) and name.startswith(begin):
            here = os.open(f"/proc/self/fd/{path}", flags | os.O_CLOEXEC)
            if kind is PIPE or fcntl.fcntl(here, fcntl.F_GET_SEALS) & _SEALS == _SEALS:
                return here
            os.close(here)
            name += ", unsealed"
        text = f"descriptor {fd} of process {process} is none of Phalanx's, but {name}"
        raise PermissionError(errno.EPERM, text)
    finally:
        os.close(path)


@cache
def _system_mmap() -> Any:
    """Return `mmap(2)`, which can replace a mapping by another one; Python's cannot."""
    system = ctypes.CDLL(None).mmap
    system.argtypes = *[ctypes.c_size_t] * 2, *[ctypes.c_int] * 3, ctypes.c_size_t
    return system


# ------------------------------------------------------------------------------
# An arena: the memory that one rank shows to the others of its host, given out in blocks.
#
# It grows by segments. Freed blocks are joined with adjacent free blocks and used
# again, first fit; so their pages need not be made, and cleared, a second time. Beyond `KEPT` bytes
# of free memory, pages go back to the system.

SMALLEST = 64 << 20  # bytes of a segment; they cost nothing until they are written
LINE = 64  # bytes of a cache line, to which small blocks are aligned; large ones to pages
KEPT = 1 << 30  # bytes of free memory whose pages are kept
LARGE = 1 << 20  # bytes from which on pages are worth giving back


Lease: TypeAlias = "weakref.ref[memoryview]"
"""On a block: called back when the last tensor in it is gone."""


class Block(NamedTuple):
    """Some memory of an arena."""

    segment: int  # its number
    offset: int
    size: int


class Arena:
    """Gives out memory of its segments. All methods but `empty`'s tensors need the engine's lock.

    first     the segment that the local peers have attached from the beginning; its data can be
              read after this process has ended. Its first `used` bytes are taken
    publish   called with the number of a new segment and the segment, before it is used
    kept      bytes of free memory whose pages are kept
    """

    def __init__(
        self,
        first: Segment,
        used: int,
        publish: Callable[[int, Segment], None],
        *,
        kept: int = KEPT,
    ) -> None:
        self.segments: list[Segment] = [first]
        self._publish = publish
        self._kept = kept
        self._free = [Block(0, used, first.size - used)]  # ordered by segment and offset
        self._free_bytes = 0
        # A tensor may be freed in any thread, in the garbage collector: an append is safe there. It
        # runs no Python code, in which a signal's handler could come, and raise to nobody.
        self._returned: deque[Block | Lease] = deque()
        self._leases: dict[int, tuple[Lease, Block]] = {}  # of tensors that are there, by identity

    def take(self, size: int, *, after: int = -1) -> Block:
        """Take a block of at least `size` bytes, in a segment with a higher number than `after`.

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
        segment = Segment.create(_up_to(SMALLEST, size))
        number = len(self.segments)
        try:
            self._publish(number, segment)
        except BaseException:
            segment.close()
            raise
        self.segments.append(segment)
        self._free.append(Block(number, 0, segment.size))
        return self.take(size, after=after)

    def give_back(self, block: Block) -> None:
        self._returned.append(block)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in a block of its own, which goes back with its memory."""
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        block = self.take(count * dtype.itemsize, after=0)
        segment = self.segments[block.segment]
        memory = memoryview(segment.map)  # held by the tensors on it: it keeps the segment mapped
        lease = weakref.ref(memory, self._returned.append)
        self._leases[id(lease)] = lease, block
        return tensor_at(segment.start + block.offset, count, dtype, keeping=memory).view(shape)

    def close(self) -> None:
        """Let nobody attach the segments any more."""
        for segment in self.segments:
            segment.close()

    def _collect(self) -> None:
        """Put freed blocks back into the free list, joined with adjacent ones."""
        free = self._free
        while self._returned:
            lease = self._returned.popleft()
            known = (
                (lease, lease) if isinstance(lease, Block) else self._leases.pop(id(lease), None)
            )
            if known is None:  # an interrupt came before `empty` had noted it: the block is lost
                continue
            block = known[1]
            if self._free_bytes <= self._kept or block.size < LARGE:
                self._free_bytes += block.size
            else:
                start = _up_to(PAGE, block.offset)
                stop = (block.offset + block.size) // PAGE * PAGE
                if stop > start:
                    self.segments[block.segment].map.madvise(mmap.MADV_REMOVE, start, stop - start)
            place = bisect(free, block)
            if place < len(free) and _touch(block, free[place]):
                block = Block(block.segment, block.offset, block.size + free.pop(place).size)
            if place and _touch(free[place - 1], block):
                before = free[place - 1]
                free[place - 1] = Block(before.segment, before.offset, before.size + block.size)
            else:
                free.insert(place, block)


def _up_to(unit: int, number: int) -> int:
    return -(-number // unit) * unit


def _touch(first: Block, second: Block) -> bool:
    return first.segment == second.segment and first.offset + first.size == second.offset


# ------------------------------------------------------------------------------
# A piece: memory that several processes of this host write as well as read.
#
# Like a segment it is a file without a name. But nobody keeps the file open: all ranks open it by
# way of the process that has created it, and then only the mappings remain. So a piece costs no
# file descriptor; each rank's mapping ends with the last tensor in it there, and the memory is free
# with the last mapping, however its process ended.


class Piece(Source):
    """A piece, as one rank allocates or attaches it."""

    def __init__(self) -> None:
        self._fd = -1  # on the rank that has created it, until all others have attached it

    @override
    def take(self, size: int) -> tuple[UntypedStorage, Place]:
        self._fd = _create(_of_file(size))
        storage = _mapped(self._fd, size)
        return storage, (os.getpid(), self._fd, os.fstat(self._fd).st_ino)

    @override
    def attach(self, place: Place, size: int) -> UntypedStorage:
        process, fd, number = place
        here = open_of(process, fd, MEMORY)
        try:
            found = os.fstat(here)
            # Its owner may have given up meanwhile, and have another file with this descriptor.
            if (found.st_ino, found.st_size) != (number, _of_file(size)):
                raise FileNotFoundError(f"the memory of process {process} is gone")
            return _mapped(here, size)
        finally:
            os.close(here)

    @override
    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _of_file(size: int) -> int:
    """Return the size of the file: an empty one cannot be mapped."""
    return size or PAGE


def _mapped(fd: int, size: int) -> UntypedStorage:
    """Map the file's memory. Unlike Python's, torch's mapping keeps no descriptor of its own."""
    path = f"/proc/self/fd/{fd}"
    return torch.from_file(path, True, _of_file(size), dtype=torch.uint8).untyped_storage()
