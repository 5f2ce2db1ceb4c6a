"""A flat parameter: the parameters of a group that have one dtype, of which this rank has a shard.

    shard        this rank's part, always there; the optimizer's Parameters are views of it
    unsharded    all shards; the UnshardedParameters that modules compute with are views of it

               the memory of `unsharded` is     unshard               reshard
    messages   there from unshard to reshard    all-gather            give the memory back
    kept       always there                     all-gather, if the    -
               (the shard is a part of it)      shards were written
    common     once for all ranks of a host     wait until all have   -
               (the shard is a part of it)      written theirs

In mixed precision `unsharded` has another dtype, so the shard is apart from it, and is converted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.collectives import PendingCollective, async_all_gather, broadcast_
from phalanx.core.backend import Backend
from phalanx.fsdp.strategy import MixedPrecision, ShardingStrategy
from phalanx.fsdp.unsharded import UnshardedParameter, UnshardState
from phalanx.parallel.averaging import least_sent
from phalanx.torch_internals import SWAPS_MEMORY, swap_memory

# Ranks and shards --------------------------------------------------------------------------------


class ShardingPlan(NamedTuple):
    """The sharding of one FSDP on this rank, and its groups; for 4 ranks and `hybrid(2)`:

        shards      (0 1)    (2 3)      these have one copy together: all-gather, reduce-scatter
        replicas    (0 2)    (1 3)      these hold the same shard: gradients are averaged

    pool              memory for groups in flight
    world             all ranks
    shards            the shard group of this rank; None if it is alone in it
    replicas          its replica group; None if it is alone in it
    shards_per_copy   number of ranks in the shard group
    shard_index       number of this rank's shard
    """

    strategy: ShardingStrategy
    precision: MixedPrecision | None
    pool: StoragePool
    world: Backend
    shards: Backend | None
    replicas: Backend | None
    shards_per_copy: int
    shard_index: int

    @classmethod
    def of(
        cls, backend: Backend, strategy: ShardingStrategy, precision: MixedPrecision | None
    ) -> ShardingPlan:
        """Return this rank's plan. Every rank calls this. `InvalidWorldSizeError` if none fits."""
        world = backend.world_size
        count = strategy.ranks_per_copy(world) if world > 1 else 1
        copy, index = divmod(backend.rank, count)
        shards = replicas = None
        if count == world:
            shards = backend if world > 1 else None
        elif count == 1:
            replicas = backend
        else:
            shards = backend.subgroup(range(copy * count, (copy + 1) * count))
            replicas = backend.subgroup(range(index, world, count))
            shards.bind(replicas)
        return cls(strategy, precision, StoragePool(), backend, shards, replicas, count, index)

    @property
    def algorithm(self) -> str:
        """Algorithm of the shard group's all-gathers and reduce-scatters.

        By messages every rank sends each part once to each other one, which is the least there is,
        in bytes and in memory; not so where several ranks are on each of several hosts, or a
        library has collectives of its own, which know better.
        """
        return "auto" if self.shards is None else least_sent(self.shards, "direct")


# Places of parameters ---------------------------------------------------------------------------


class FlatLayout:
    """The places of parameters of some shapes in flat memory, which is cut into shards.

        w: 5 elements, b: 2, over 3 ranks

        | w w w | w w b | b . . |       . is padding
          rank 0  rank 1  rank 2

    Parameters follow each other without gaps; the end is padded to a multiple of the number of
    shards. So a shard has a contiguous part of each parameter, or nothing of it.

    starts    where each begins; and where the last one ends
    total     elements of all parameters
    shard     elements of a shard
    padded    elements of all shards
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], shards: int) -> None:
        self.shapes = tuple(shapes)
        self.starts = [0, *accumulate(prod(shape) for shape in shapes)]
        self.total = self.starts[-1]
        self.shard = -(-self.total // shards)
        self.padded = self.shard * shards

    def part(self, number: int, index: int) -> tuple[int, int]:
        """Return the elements start:stop of parameter `number` that lie in shard `index`."""
        begin, end = self.starts[number], self.starts[number + 1]
        first, last = index * self.shard, (index + 1) * self.shard
        start = min(max(begin, first), end) - begin
        return start, max(start, min(end, last) - begin)

    def inside(self, number: int, index: int) -> tuple[int, int]:
        """Return their place in that shard."""
        start, stop = self.part(number, index)
        offset = self.starts[number] - index * self.shard
        return (offset + start, offset + stop) if start < stop else (0, 0)


# Memory -----------------------------------------------------------------------------------------


class StoragePool:
    """Memory for groups in flight, of one model on one rank, used again and again.

        groups   0       1       2       3
                 |       |                       unsharded parameters: taken, and put back here
        pool     [.....] [.....]                 as many as were in flight at a time

    Given back to the C library each time, blocks as large as these would leave holes in its heap
    that nothing else fits into, and a process would hold twice what it needs; or the system would
    clear their pages anew, which takes longer than an all-gather.
    """

    def __init__(self) -> None:
        self._idle: list[torch.UntypedStorage] = []

    def take(self, size: int) -> torch.UntypedStorage:
        """Return at least so many bytes, uninitialized."""
        fitting = [storage for storage in self._idle if storage.nbytes() >= size]
        if fitting:
            best = min(fitting, key=torch.UntypedStorage.nbytes)
            self._idle.remove(best)
            return best
        if self._idle:  # in the place of one that is too small, so that no more than needed is kept
            self._idle.remove(max(self._idle, key=torch.UntypedStorage.nbytes))
        return torch.UntypedStorage(size)  # type: ignore[no-untyped-call]

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Take memory back that nobody uses."""
        self._idle.append(storage)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor in such memory; give its storage back afterwards."""
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(self.take(count * dtype.itemsize), 0, (count,), (1,))
        return tensor

    def attach(self, tensor: Tensor, size: int) -> None:
        """Put memory behind a tensor that has none, and all tensors that share its storage."""
        storage = tensor.untyped_storage()
        if SWAPS_MEMORY and tensor.is_cpu:
            swap_memory(storage, self.take(size))
        else:
            storage.resize_(size)

    def detach(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if SWAPS_MEMORY and tensor.is_cpu and storage.nbytes():
            holder = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
            swap_memory(holder, storage)
            self.give_back(holder)
        else:
            storage.resize_(0)


def trim_heap() -> None:
    """Give freed memory that the C library has kept to the system, if it can (glibc)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


# The flat parameter -----------------------------------------------------------------------------


class FlatParameter:
    """Parameters of one dtype and device of a group, on this rank.

    label        the group's name and its number in that: the same on all ranks, for messages
    parameters   this rank's, by `names`: views of the shard, given to the optimizer
    views        the UnshardedParameter that modules see in the place of each
    common       whether the ranks of the shard group have the unsharded memory in common
    apart        whether the shard is not a part of that
    current      whether the unsharded memory holds what the shards do
    homes        the unsharded parameters' places in the unsharded memory
    """

    layout: FlatLayout

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        label: str,
        state: UnshardState,
        plan: ShardingPlan,
        old: FlatParameter | None = None,
    ) -> None:
        """`old` has the parameters now, if they are shards already: of other ranks, perhaps."""
        self.plan = plan
        self.label = label
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        shapes = [tuple(p.shape) for p in self.parameters] if old is None else old.layout.shapes
        self.layout = FlatLayout(shapes, plan.shards_per_copy)
        self.compute_dtype = self.dtype
        if plan.precision is not None and self.dtype.is_floating_point:
            self.compute_dtype = plan.precision.compute_dtype
        common = None
        if plan.shards is not None and self.device.type == "cpu":
            common = plan.shards.common(self.layout.padded, self.compute_dtype)
        self.common = common is not None
        keeps = plan.strategy.keeps_whole or self.common or plan.shards is None
        self._releases = not keeps
        self.apart = self._releases or self.compute_dtype is not self.dtype
        self.unsharded = common if common is not None else self._empty(self.compute_dtype)
        self.shard = (
            torch.empty(self.layout.shard, dtype=self.dtype, device=self.device)
            if self.apart
            else self._own(self.unsharded)
        )
        if old is not None and self._is_in_place(old):
            self.shard = old.shard
            self.unsharded = self.unsharded if self.apart else old.unsharded
        self.current = False
        self._pending: PendingCollective[Tensor] | None = None
        # As .data: writes to it do not count as a change of tensors that autograd saved.
        self.homes = self.split(self.unsharded.data)
        self.views = [
            UnshardedParameter(home, state, name, shard)
            for name, home, shard in zip(self.names, self.homes, self.parameters, strict=True)
        ]
        if self._releases:
            self.unsharded.untyped_storage().resize_(0)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.layout.padded, dtype=dtype, device=self.device)

    def _own(self, full: Tensor) -> Tensor:
        """Return this rank's shard of full values."""
        size, index = self.layout.shard, self.plan.shard_index
        return full[index * size : (index + 1) * size]

    def split(self, full: Tensor) -> list[Tensor]:
        """Return each parameter, in its own shape, as a view of full values."""
        places = zip(self.layout.starts, self.layout.shapes, strict=False)
        return [full[start : start + prod(shape)].view(shape) for start, shape in places]

    def split_shard(self, shard: Tensor) -> list[Tensor]:
        """Return each parameter's part of memory like the shard, in the optimizer's shape."""
        parts = []
        for number, shape in enumerate(self.layout.shapes):
            start, stop = self.layout.inside(number, self.plan.shard_index)
            part = shard[start:stop]
            parts.append(part.view(shape) if self.plan.strategy.name == "no_shard" else part)
        return parts

    # Values of shards -----------------------------------------------------------------------

    def regrouped(self, state: UnshardState, plan: ShardingPlan) -> FlatParameter:
        """Return one of the same parameters, for other ranks. `move_in` makes them its shards."""
        plan = plan if self.plan.precision is not None else plan._replace(precision=None)
        parameters = dict(zip(self.names, self.parameters, strict=True))
        return FlatParameter(parameters, self.label, state, plan, self)

    def _is_in_place(self, old: FlatParameter) -> bool:
        """Return whether its shard is this one, in memory that nobody else reads or writes."""
        places = {(p.shards_per_copy, p.shard_index) for p in (self.plan, old.plan)}
        alone = self.apart or self.plan.shards is None
        return len(places) == 1 and self.apart is old.apart and alone

    def adopt(self) -> None:
        """Make the Parameters views of the shard, with this rank's part of rank 0's values, whole
        before. Moves these once.
        """
        full = self._empty(self.dtype)
        for part, parameter in zip(self.split(full), self.parameters, strict=True):
            part.copy_(parameter.detach())
        full[self.layout.total :].zero_()
        if self.plan.world.world_size > 1:
            label = f"FSDP takes rank 0's values of {', '.join(self.names)}"
            broadcast_(full, self.plan.world, label=label)
        self.write(full)
        self.move_in()

    def move_in(self) -> None:
        """Make the Parameters views of the shard, as it is."""
        for parameter, part in zip(self.parameters, self.split_shard(self.shard), strict=True):
            parameter.data = part

    def write(self, full: Tensor) -> None:
        """Overwrite this rank's shard with its part of full values, which are padded."""
        self.shard.copy_(self._own(full))

    def all_shards(self) -> Tensor:
        """Return all ranks' shards, in their own dtype: a copy, or memory not to be written.

        A collective of the shard group. With common memory, a rank waits for the others before.
        """
        if self.plan.shards is None or (self.common and not self.apart):
            return self.shard if self.apart else self.unsharded
        full = self._empty(self.dtype)
        self._own(full).copy_(self.shard)
        self._all_gather(full, "FSDP gathers shards").wait()
        return full

    # Unshard and reshard --------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to fill the unsharded memory, if it is not there, or out of date."""
        if self.current or self._pending is not None:
            return
        if self._releases:
            self.plan.pool.attach(
                self.unsharded, self.layout.padded * self.unsharded.element_size()
            )
            self._own(self.unsharded).copy_(self.shard)
        if self.plan.shards is None or self.common:
            self.current = True
        else:
            self._pending = self._all_gather(self.unsharded, f"FSDP gathers {self.label}")

    def wait_for_unshard(self) -> None:
        """Wait until it is filled."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            self.current = True

    def reshard(self) -> None:
        """Give the unsharded memory back, if it does not stay. Waits for an unshard under way."""
        self.wait_for_unshard()
        if self._releases:
            self.plan.pool.detach(self.unsharded)
            self.current = False

    def close(self) -> None:
        """Free the unsharded memory, whoever refers to it, such as a graph; not if the shard is a
        part of it, or others write it: then it goes with the last who refers to it.
        """
        written = self.common or (self._pending is not None and not self._pending.over)
        if self.apart and not written:
            self.unsharded.untyped_storage().resize_(0)

    def convert(self) -> None:
        """Write this rank's part of unsharded memory that stays. Nobody may be reading it."""
        if self.apart and not self._releases and not self.current:
            self._own(self.unsharded).copy_(self.shard)

    def _all_gather(self, full: Tensor, label: str) -> PendingCollective[Tensor]:
        plan, own = self.plan, self._own(full)
        assert plan.shards is not None
        return async_all_gather(own, plan.shards, algorithm=plan.algorithm, into=full, label=label)

    def show(self, values: Sequence[Tensor]) -> None:
        """Let modules see these: `homes`, or for a while others."""
        for view, value in zip(self.views, values, strict=True):
            view.data = value
