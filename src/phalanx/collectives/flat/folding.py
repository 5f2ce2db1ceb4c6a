"""Folding: contributions, in rank order, become one."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.collectives.plan import Plan
from phalanx.collectives.reduce_op import WIDER, ReduceOp, divide_, reduction_for

BLOCK = 256 << 10  # bytes folded at a time in a wider dtype, or beside the result
LARGEST = 1 << 20  # bytes folded at a time in the result itself


class Folding:
    """A plan's reduction of `size` contributions, rounded once and divided for a mean.

    The order is that of the ranks, so that the bits are the same on every rank and backend as with
    `direct`. Short floating-point dtypes are folded in a wider one.
    """

    def __init__(self, plan: Plan, size: int) -> None:
        dtype = plan.key.dtype
        reduction = reduction_for(plan.key.op, dtype)
        self._combine = reduction.combine
        self._wider = WIDER.get(dtype) if reduction.adds_up else None
        self._divisor = size if plan.key.op is ReduceOp.MEAN else 0
        self._block = BLOCK // dtype.itemsize
        self._scratch: Tensor | None = None

    def fold(self, parts: list[Tensor], out: Tensor) -> None:
        """Fold `parts`, at least two, into `out`, which may be the memory of one of them."""
        if self._wider is None and (len(parts) == 2 or self._fits(parts, out)):
            self._combine(parts[0], parts[1], out)
            for part in parts[2:]:
                self._combine(out, part, out)
            if self._divisor:
                divide_(out, self._divisor)
            return
        for start in range(0, out.numel(), self._block):
            block = slice(start, start + self._block)
            total = self._folded([part[block] for part in parts])
            out[block].copy_(total)

    def _fits(self, parts: list[Tensor], out: Tensor) -> bool:
        """Whether `out` can hold what is folded: it stays in the cache, and none is read there."""
        if out.nbytes > LARGEST:
            return False
        address = out.data_ptr()
        return all(part.data_ptr() != address for part in parts[2:])

    def _folded(self, parts: list[Tensor]) -> Tensor:
        if self._wider is not None:
            parts = [part.to(self._wider) for part in parts]
        total = self._room(parts[0])
        self._combine(parts[0], parts[1], total)
        for part in parts[2:]:
            self._combine(total, part, total)
        if self._divisor:
            divide_(total, self._divisor)
        return total

    def _room(self, like: Tensor) -> Tensor:
        """Memory beside the contributions: `out` may be that of one which is still to be read."""
        if self._scratch is None:
            self._scratch = torch.empty(self._block, dtype=like.dtype)
        return self._scratch[: like.numel()]
