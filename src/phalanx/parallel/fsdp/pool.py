"""Memory for units in flight, used again and again.

Given back to the C library each time, blocks as large as units would leave holes in its heap that
nothing else fits into, and a process would hold twice what it needs; or the system would have to
clear their pages anew, which takes longer than to gather them.

    units    0       1       2       3
             |       |                          full parameters: taken, and put in their place
    pool     [.....] [.....]                    as many as were in flight at a time
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

SWAPS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # since torch 2.12


def trim() -> None:
    """Give back to the system what the C library has kept of freed memory, if it can (glibc)."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


class Pool:
    """Of one model on one rank, for the processor's memory."""

    def __init__(self) -> None:
        self._idle: list[torch.UntypedStorage] = []

    def take(self, size: int) -> torch.UntypedStorage:
        """At least so many bytes, uninitialized."""
        fitting = [storage for storage in self._idle if storage.nbytes() >= size]
        if fitting:
            best = min(fitting, key=torch.UntypedStorage.nbytes)
            self._idle.remove(best)
            return best
        if self._idle:  # in the place of one that is too small, so that no more than needed is kept
            self._idle.remove(max(self._idle, key=torch.UntypedStorage.nbytes))
        return torch.UntypedStorage(size)  # type: ignore[no-untyped-call]

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Nobody uses it any more."""
        self._idle.append(storage)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor of one dimension in such memory; its storage is to be given back."""
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(self.take(count * dtype.itemsize), 0, (count,), (1,))
        return tensor

    # Tensors that stay ----------------------------------------------------------------------

    def fill_in(self, tensor: Tensor, size: int) -> None:
        """Put memory behind a tensor that has none. What refers to its storage has it, too."""
        storage = tensor.untyped_storage()
        if SWAPS and tensor.is_cpu:
            storage._swap_data_ptr_(self.take(size))  # type: ignore[attr-defined]
        else:
            storage.resize_(size)

    def take_out(self, tensor: Tensor) -> None:
        """Take it away."""
        storage = tensor.untyped_storage()
        if SWAPS and tensor.is_cpu and storage.nbytes():
            holder = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
            holder._swap_data_ptr_(storage)  # type: ignore[attr-defined]
            self.give_back(holder)
        else:
            storage.resize_(0)
