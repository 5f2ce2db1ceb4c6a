"""What a plan's reductions are on one call's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from phalanx.backends.engine.rounds import Round
from phalanx.collectives.binder import Finish, Fold
from phalanx.collectives.plan import Plan, PlanStep
from phalanx.collectives.reduce_op import WIDER, divide_

BLOCK = 1 << 16  # elements folded at a time in a wider dtype; they fit the second-level cache


class Arithmetic:
    """Combines what comes into `work`, and carries out the plan's local steps on it."""

    def __init__(self, plan: Plan, work: Tensor, stage: Tensor | None, size: int) -> None:
        assert plan.reduction is not None
        self._flat = work.view(-1)
        self._stage = stage
        self._reduce = plan.reduction.combine
        self._wider = WIDER.get(work.dtype) if plan.reduction.adds_up else None
        self._size = size
        self._divisor = plan.divisor

    def combine(self, buffer: int, start: int, block: memoryview) -> None:
        """Reduce a block that came into the work buffer, from byte `start` on."""
        incoming = torch.frombuffer(block, dtype=self._flat.dtype)
        first = start // self._flat.itemsize
        own = self._flat[first : first + incoming.numel()]
        self._reduce(own, incoming, own)

    def carry_out(self, program: Iterable[PlanStep]) -> Iterator[Round]:
        """The rounds of a plan; what is to be done between them is done on the way."""
        for step in program:
            if isinstance(step, Round):
                yield step
            elif isinstance(step, Fold):
                self._fold(step)
            elif isinstance(step, Finish):
                divide_(self._flat[step.start : step.stop], self._divisor)
            else:
                self._flat.mul_(1 / step.divisor)

    def _fold(self, step: Fold) -> None:
        own = self._flat[step.start : step.stop]
        parts = [own if slot is None else self._staged(slot, own) for slot in step.slots]
        if self._wider is not None:
            for start in range(0, own.numel(), BLOCK):
                block = slice(start, start + BLOCK)
                self._fold_wider(own[block], [p[block] for p in parts], self._wider, step.mean)
            return
        total = parts[0]
        for part in parts[1:]:
            self._reduce(total, part, total)
        if total is not own:
            own.copy_(total)

    def _fold_wider(self, own: Tensor, parts: list[Tensor], wider: torch.dtype, mean: bool) -> None:
        """Reduce `parts`, of which `own` is one, into it, and round once."""
        total = parts[0].to(wider)
        for part in parts[1:]:
            self._reduce(total, part.to(wider), total)
        if mean:
            divide_(total, self._size)
        own.copy_(total)

    def _staged(self, slot: int, like: Tensor) -> Tensor:
        assert self._stage is not None
        return self._stage[slot : slot + like.nbytes].view(like.dtype)
