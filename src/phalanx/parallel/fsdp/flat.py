"""The parameters of a unit that have one dtype: flat memory, of which this rank keeps a shard.

    shard      this rank's part, always there; the optimizer's Parameters are views of it
    full       all shards; the `Whole` parameters that modules compute with are views of it

               full is                        to gather             to free
    messages   there from gather to free      all-gather            give the memory back
    kept       always there                   all-gather, if the    -
               (the shard is a part of it)    shards were written
    common     once for all ranks of a host   wait until all have   -
               (the shard is a part of it)    written theirs

In mixed precision `full` has another dtype, so the shard is apart from it, and is converted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.collectives import PendingCollective
from phalanx.collectives.task import Task
from phalanx.parallel.fsdp.collective import begin
from phalanx.parallel.fsdp.layout import Layout
from phalanx.parallel.fsdp.pool import Pool
from phalanx.parallel.fsdp.ranks import Ranks
from phalanx.parallel.fsdp.whole import Presence, Whole


class Flat:
    """Parameters of one dtype and device of a unit, on this rank.

    parameters   this rank's, by name: views of the shard, given to the optimizer
    wholes       what stands for each while the module computes
    common       whether the ranks of the group have the full memory in common
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        ranks: Ranks,
        presence: Presence,
        pool: Pool,
        *,
        keeps_whole: bool,
        keeps_shape: bool,
        compute_dtype: torch.dtype | None,
    ) -> None:
        first = next(iter(parameters.values()))
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.dtype, self.device = first.dtype, first.device
        self.layout = Layout([tuple(p.shape) for p in self.parameters], ranks.size)
        self._ranks = ranks
        self._pool = pool
        converted = compute_dtype is not None and self.dtype.is_floating_point
        self.compute_dtype = compute_dtype if converted and compute_dtype else self.dtype
        common = self._common_memory()
        self.common = common is not None
        self._frees = not (keeps_whole or self.common or ranks.size == 1)
        self.full = common if common is not None else self._memory(self.compute_dtype)
        self.apart = self._frees or self.compute_dtype is not self.dtype
        self.shard = (
            torch.empty(self.layout.shard, dtype=self.dtype, device=self.device)
            if self.apart
            else self._own(self.full)
        )
        self._keeps_shape = keeps_shape
        self._current = False  # whether `full` holds what the shards do
        self._pending: PendingCollective[Tensor] | None = None
        # As .data: what is written into `full` does not count as a change of what autograd saved.
        self._homes = self.views(self.full.data)
        self.wholes = [
            Whole(home, presence, name) for name, home in zip(self.names, self._homes, strict=True)
        ]
        if self._frees:
            self.full.untyped_storage().resize_(0)

    @property
    def place(self) -> int:
        """Which shard this rank holds."""
        return self._ranks.place

    def _common_memory(self) -> Tensor | None:
        shards = self._ranks.shards
        if shards is None or self.device.type != "cpu":
            return None
        return shards.common(self.layout.padded, self.compute_dtype)

    def _memory(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.layout.padded, dtype=dtype, device=self.device)

    def _own(self, full: Tensor) -> Tensor:
        place, size = self._ranks.place, self.layout.shard
        return full[place * size : (place + 1) * size]

    # Places ---------------------------------------------------------------------------------

    def views(self, full: Tensor) -> list[Tensor]:
        """Each parameter in some full memory, in its own shape."""
        return [
            full[start : start + shape.numel()].view(shape)
            for start, shape in zip(
                self.layout.starts, map(torch.Size, self.layout.shapes), strict=False
            )
        ]

    def parts(self, shard: Tensor) -> list[Tensor]:
        """Each parameter's part of some memory like the shard, as the optimizer sees it."""
        parts = []
        for index, shape in enumerate(self.layout.shapes):
            start, stop = self.layout.inside(index, self._ranks.place)
            part = shard[start:stop]
            parts.append(part.view(shape) if self._keeps_shape else part)
        return parts

    # The shard ------------------------------------------------------------------------------

    def adopt(self, full: Tensor) -> None:
        """Take this rank's shard from full values of its own, and show it to the optimizer.

        `full` is padded, in the dtype of the shards. The Parameters are the same objects as before.
        """
        self.shard.copy_(self._own(full))
        self._current = False
        for parameter, part in zip(self.parameters, self.parts(self.shard), strict=True):
            parameter.data = part

    def joined(self) -> Tensor:
        """The values that the Parameters have before they are cut: flat, padded, a copy."""
        joined = self._memory(self.dtype)
        for view, parameter in zip(self.views(joined), self.parameters, strict=True):
            view.copy_(parameter.detach())
        joined[self.layout.total :].zero_()
        return joined

    def take(self, full: Tensor) -> None:
        """Overwrite this rank's shard with its part of full values."""
        self.shard.copy_(self._own(full))

    def lend(self, full: Tensor) -> None:
        """Let modules see these values, and `take_back` what stands for parameters later."""
        for whole, view in zip(self.wholes, self.views(full), strict=True):
            whole.data = view

    def take_back(self) -> None:
        """Let modules see the full memory of this again."""
        for whole, home in zip(self.wholes, self._homes, strict=True):
            whole.data = home

    def all_shards(self) -> Tensor:
        """All ranks' shards, in the dtype that they have: a copy, or memory not to be written.

        A collective of the group. With common memory, a rank waits for the others before.
        """
        if self._ranks.shards is None or (self.common and not self.apart):
            return self.shard if self.apart else self.full
        full = self._memory(self.dtype)
        self._own(full).copy_(self.shard)
        self._gather_into(full, "FSDP gathers shards").wait()
        return full

    # The full memory ------------------------------------------------------------------------

    def convert(self) -> None:
        """Write this rank's part of full memory that stays. Nobody may be reading it."""
        if self.apart and not self._frees and not self._current:
            self._own(self.full).copy_(self.shard)

    def begin_gather(self, label: str) -> None:
        """Let the others' shards come, if they have to."""
        if self._current or self._pending is not None:
            return
        if self._frees:
            self._pool.fill_in(self.full, self.layout.padded * self.full.element_size())
            self._own(self.full).copy_(self.shard)
        if self._ranks.shards is None or self.common:
            self._current = True
        else:
            self._pending = self._gather_into(self.full, label)

    def finish_gather(self) -> None:
        """Wait until they are there."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            self._current = True

    def free(self) -> None:
        """Full parameters are not needed now."""
        if self._frees:
            self.finish_gather()
            self._release()

    def written(self) -> None:
        """Shards were, so full memory is out of date."""
        self.free()
        self._current = False

    def _gather_into(self, full: Tensor, label: str) -> PendingCollective[Tensor]:
        shards = self._ranks.shards
        assert shards is not None
        task: Task[Tensor] = Task(
            "all_gather", tuple(full.shape), full.dtype, self._own(full), full, lambda: full
        )
        return begin(task, shards, label)

    def _release(self) -> None:
        self._pool.take_out(self.full)
        self._current = False

    # Which need gradients -------------------------------------------------------------------

    def trainable(self) -> list[int]:
        """The numbers of parameters that require gradients now; what stands for them does, too."""
        numbers = []
        for number, (parameter, whole) in enumerate(zip(self.parameters, self.wholes, strict=True)):
            if parameter.requires_grad is not whole.requires_grad:
                whole.requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                numbers.append(number)
        return numbers

    def __repr__(self) -> str:
        return f"Flat({', '.join(self.names)}: {self.layout.total} x {self.dtype})"
