"""A segment: memory that several processes of one host have mapped.

It is a file without a name (memfd), so nothing has to be removed: when the last process that has it
mapped is gone, however it ended, the memory is free. Others open it by way of the owner's process,
`/proc/<process>/fd/<number>`, which the system lets only the same user do.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

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
        """New memory of so many bytes, all zero. Takes pages only when they are written."""
        fd = os.memfd_create("phalanx", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, process: int, fd: int) -> Segment:
        """Map what another process has created. Raises OSError if that cannot be, or may not."""
        here = open_of(process, fd, os.O_RDWR)
        try:
            segment = cls(here, os.fstat(here).st_size)
        finally:
            os.close(here)
        segment.fd = -1
        return segment

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """A view of `count` elements from byte `offset` on."""
        return tensor_at(self.start + offset, count, dtype, keeping=self)

    def close(self) -> None:
        """Let nobody else attach it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_of(process: int, fd: int, flags: int) -> int:
    """Open a file that another process of this host has open."""
    return os.open(f"/proc/{process}/fd/{fd}", flags | os.O_CLOEXEC)


def tensor_at(address: int, count: int, dtype: torch.dtype, *, keeping: object) -> Tensor:
    """A tensor of `count` elements at an address; it keeps that object alive."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    array = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    array.owner = keeping  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=dtype)
