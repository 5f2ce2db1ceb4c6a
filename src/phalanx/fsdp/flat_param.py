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

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.collectives import PendingCollective
from phalanx.collectives.request import Task
from phalanx.collectives.resolve import start
from phalanx.core.backend import Backend
from phalanx.fsdp.strategy import ShardingStrategy
from phalanx.fsdp.unsharded import Presence, Whole


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


# ------------------------------------------------------------------------------
# Where parameters lie in the flat memory of a unit, and which shard has what of them.
#
#     w: 5 elements, b: 2, over 3 ranks
#
#     | w w w | w w b | b . . |       . is padding
#       rank 0  rank 1  rank 2
#
# Parameters follow each other without gaps; the whole is padded to a multiple of the number of
# ranks. So a shard has a contiguous part of each parameter, or nothing of it.


class Layout:
    """The places of parameters of these shapes, cut into `parts` shards.

    starts   where each begins; and where the last one ends
    shard    elements of a shard
    padded   elements of all shards
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], parts: int) -> None:
        self.shapes = tuple(shapes)
        self.starts = [0, *accumulate(prod(shape) for shape in shapes)]
        self.shard = -(-self.starts[-1] // parts)
        self.padded = self.shard * parts

    @property
    def total(self) -> int:
        """Elements of all parameters."""
        return self.starts[-1]

    def part(self, index: int, place: int) -> tuple[int, int]:
        """The elements start:stop of a parameter that lie in shard `place`."""
        begin, end = self.starts[index], self.starts[index + 1]
        first, last = place * self.shard, (place + 1) * self.shard
        start = min(max(begin, first), end) - begin
        return start, max(start, min(end, last) - begin)

    def inside(self, index: int, place: int) -> tuple[int, int]:
        """Where these lie in that shard."""
        start, stop = self.part(index, place)
        if start == stop:
            return 0, 0
        offset = self.starts[index] - place * self.shard
        return offset + start, offset + stop

    def picture(self, letters: Sequence[str]) -> str:
        """As above, with a letter for each parameter."""
        counts = [prod(shape) for shape in self.shapes]
        cells = [letter for letter, n in zip(letters, counts, strict=True) for _ in range(n)]
        cells += ["."] * (self.padded - self.total)
        shards = range(0, self.padded, self.shard or 1)
        return "".join(f"| {' '.join(cells[i : i + self.shard])} " for i in shards) + "|"


# ------------------------------------------------------------------------------
# Memory for units in flight, used again and again.
#
# Given back to the C library each time, blocks as large as units would leave holes in its heap that
# nothing else fits into, and a process would hold twice what it needs; or the system would have to
# clear their pages anew, which takes longer than to gather them.
#
#     units    0       1       2       3
#              |       |                          full parameters: taken, and put in their place
#     pool     [.....] [.....]                    as many as were in flight at a time

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


# ------------------------------------------------------------------------------
# How FSDP starts a collective.

_MOVED = ("all_gather", "reduce_scatter")


def begin(task: Task[Tensor], backend: Backend, label: str) -> PendingCollective[Tensor]:
    """Start it; it moves on while this rank computes, if that helps.

    By messages every rank sends each part once to each other one, which is the least there is, in
    bytes and in memory; not so where several ranks are on each of several hosts, or a library has
    collectives of its own, which know better.
    """
    hosts = len(set(backend.topology))
    plain = backend.native is None and hosts in (1, backend.world_size)
    least = plain and not backend.shares_memory and task.collective in _MOVED
    return start(
        task,
        backend,
        algorithm="direct" if least else "auto",
        background=backend.spares_a_processor,
        label=label,
    )


# ------------------------------------------------------------------------------
# Which ranks share one copy of the parameters, and which hold the same shard.


class Ranks(NamedTuple):
    """The groups of one rank, for 4 ranks and `hybrid(2)`:

        shards      (0 1)    (2 3)      among these shards are cut: gather, reduce-scatter
        replicas    (0 2)    (1 3)      these hold the same shard: gradients are averaged

    world      all ranks
    shards     the group of this rank over which shards are cut; None if it is alone in it
    replicas   the ranks that hold the same shard; None if it alone does
    size       how many shards a copy has
    place      which one this rank holds
    """

    world: Backend
    shards: Backend | None
    replicas: Backend | None
    size: int
    place: int


def ranks_of(backend: Backend, strategy: ShardingStrategy) -> Ranks:
    """This rank's groups. Every rank of `backend` calls this; `InvalidWorldSizeError` may come."""
    world = backend.world_size
    size = strategy.ranks_per_copy(world)
    copy, place = divmod(backend.rank, size)
    shards = replicas = None
    if size == world:
        shards = backend if world > 1 else None
    elif size == 1:
        replicas = backend
    else:
        shards = backend.subgroup(range(copy * size, (copy + 1) * size))
        replicas = backend.subgroup(range(place, world, size))
    return Ranks(backend, shards, replicas, size, place)
