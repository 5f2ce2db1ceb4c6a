"""A piece of memory of its own size, which several processes of this host write as well as read.

As a segment (segment.py) it is a file without a name. But nobody keeps that open: it is opened by
way of the process that has made it while all attach it, and from then on the mappings are all that
there is of it. So a piece costs no file descriptor; each rank's mapping ends with the last tensor
in it there, and the memory is free with the last mapping, however its process ended.
"""

from __future__ import annotations

import os

import torch
from torch import UntypedStorage
from typing_extensions import override

from phalanx.backends.common import Place, Source
from phalanx.backends.shm.segment import PAGE, open_of


class Piece(Source):
    """One, as one rank takes or attaches it."""

    def __init__(self) -> None:
        self._fd = -1  # of who has taken it, until all others have it, too

    @override
    def take(self, size: int) -> tuple[UntypedStorage, Place]:
        self._fd = os.memfd_create("phalanx", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _of_file(size))
        storage = _mapped(self._fd, size)
        return storage, (os.getpid(), self._fd, os.fstat(self._fd).st_ino)

    @override
    def attach(self, place: Place, size: int) -> UntypedStorage:
        process, fd, number = place
        here = open_of(process, fd, os.O_RDWR)
        try:
            found = os.fstat(here)
            # Who has taken it may have given up meanwhile, and have another file of that number.
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
    """Bytes of the file: nothing cannot be mapped."""
    return size or PAGE


def _mapped(fd: int, size: int) -> UntypedStorage:
    """The file's memory. Unlike Python's, torch's mapping keeps no descriptor of its own."""
    path = f"/proc/self/fd/{fd}"
    return torch.from_file(path, True, _of_file(size), dtype=torch.uint8).untyped_storage()
