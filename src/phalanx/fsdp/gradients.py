"""Gradients of full parameters become gradients of shards.

    autograd gives one of a whole parameter    put      copied to flat memory, and dropped
    all of the flat memory's are in            reduce   reduce-scatter: the mean of this rank's part
    ... between replicas                                all-reduce of that part
                                                        (one of the two by a compressor, perhaps)
    the end of the backward pass               give     parameters' .grad

So no full gradient lives longer than until its unit is complete. Under `no_sync` autograd's own
stay, and are added up there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from phalanx.collectives import ReduceOp
from phalanx.collectives.request import Task, in_place, memory_for
from phalanx.compression import Compressor
from phalanx.compression.compressor import (
    AllReduceMean,
    GradientBucket,
    Member,
    ReduceScatterMean,
    Rounds,
    is_finite,
)
from phalanx.compression.state import slice_key
from phalanx.core.backend import Backend
from phalanx.errors import UnsupportedOperationError
from phalanx.fsdp.flat_param import Flat, Pool, Ranks, begin
from phalanx.parallel.averaging import PendingAverage, RequestExecutor, bytes_of
from phalanx.parallel.compressor_state import UNSHARDED, GradientSharding

LARGE = 1 << 20  # bytes from which on it pays to leave this rank's own part where it is


class Gradients:
    """Of one flat's parameters, in one backward pass.

    used         the numbers of parameters that have had a gradient on this rank
    bytes_sent   by this rank so far, of what was not compressed, as rings and direct messages do
    """

    def __init__(
        self,
        flat: Flat,
        ranks: Ranks,
        pool: Pool,
        reduce_dtype: torch.dtype | None,
        compression: Compression | None = None,
    ) -> None:
        self.used: set[int] = set()
        self.bytes_sent = 0
        self._flat = flat
        self._ranks = ranks
        self._pool = pool
        self._compression = compression
        self._scatters_compressed = compression is not None and compression.scatters
        shards = ranks.shards  # where memory is shared, others read it: it is the backend's
        read = shards is not None and shards.shares_memory and not self._scatters_compressed
        self._pooled = shards is not None and not read and flat.device.type == "cpu"
        self._dtype = reduce_dtype or flat.compute_dtype
        large = flat.layout.padded * self._dtype.itemsize >= LARGE
        self._leaves_own = read and large
        self._elsewhere: dict[int, Tensor] = {}
        self._memory: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing: set[int] = set()
        self._scattering: tuple[Awaited, Tensor, Tensor] | None = None
        self._averaging: list[Awaited] = []
        self._means: list[Tensor] = []

    def put(self, number: int) -> None:
        """Take in autograd's gradient of a parameter, which is gone then."""
        if self._memory is None:
            self._begin()
        whole = self._flat.wholes[number]
        grad, whole.grad = whole.grad, None
        if grad is None:
            return
        if grad.layout is not torch.strided:
            rank = self._ranks.world.rank
            raise UnsupportedOperationError(
                f"rank {rank}: FSDP: the gradient of {self._flat.names[number]} is {grad.layout}; "
                "only dense gradients are reduced (pass sparse=False)",
                rank=rank,
                op="FSDP",
            )
        self._take_in(number, grad)
        self._missing.discard(number)
        self.used.add(number)

    def _take_in(self, number: int, grad: Tensor) -> None:
        view = self._views[number]
        kept = self._elsewhere.pop(number, None)
        start, stop = self._flat.layout.part(number, self._ranks.place)
        if number not in self._missing:  # a second time, before the others' first
            if kept is not None:
                view.view(-1)[start:stop].copy_(kept)
            view.add_(grad)
        elif self._leaves_own and grad.dtype is self._dtype and grad.is_contiguous():
            # Nobody else reads this rank's own part: it is folded from where it is.
            values, place = grad.view(-1), view.view(-1)
            place[:start].copy_(values[:start])
            place[stop:].copy_(values[stop:])
            if start < stop:
                self._elsewhere[number] = values[start:stop]
        else:
            view.copy_(grad)

    def put_rest(self) -> None:
        """Take in what autograd has left of earlier passes that were not reduced."""
        for number, whole in enumerate(self._flat.wholes):
            if whole.grad is not None:
                self.put(number)

    @property
    def begun(self) -> bool:
        """Whether some are in that are not reduced."""
        return self._memory is not None

    def _begin(self) -> None:
        flat = self._flat
        group = self._ranks.shards or self._ranks.replicas or self._ranks.world
        count = flat.layout.padded
        self._memory = (
            self._pool.empty(count, self._dtype)
            if self._pooled
            else memory_for(group, (count,), self._dtype, flat.device)
        )
        self._memory[flat.layout.total :].zero_()
        self._views = flat.views(self._memory)
        self._missing = set(range(len(self._views)))

    def reduce(self, label: str) -> None:
        """Begin to average with the other ranks; parameters without a gradient count as zeros."""
        if self._memory is None:
            self._begin()
        for number in self._missing:
            self._views[number].zero_()
        memory, self._memory, self._views = self._memory, None, []
        assert memory is not None
        shards, replicas = self._ranks.shards, self._ranks.replicas
        if shards is None:
            self._means.append(memory)
            self._average(memory, label)
            return
        shape = (self._flat.layout.shard,)
        into = memory_for(replicas or shards, shape, self._dtype, self._flat.device)
        self._scattering = self._scatter(shards, memory, into, label), into, memory
        if not shards.spares_a_processor:  # nobody else moves it on: sooner done, sooner freed
            self.finish_scattering(label)

    def _scatter(self, shards: Backend, memory: Tensor, into: Tensor, label: str) -> Awaited:
        if self._compression is not None and self._scatters_compressed:
            return self._compression.scatter(self._flat, memory, into, label)
        self.bytes_sent += bytes_of(ReduceScatterMean(memory), shards.world_size)
        task: Task[Tensor] = Task(
            *("reduce_scatter", tuple(memory.shape), self._dtype, memory, into, lambda: into),
            op=ReduceOp.MEAN,
            consumes=True,
            elsewhere=self._take_elsewhere(),
        )
        return begin(task, shards, label)

    def _take_elsewhere(self) -> tuple[tuple[int, Tensor], ...]:
        """What was not copied: where in this rank's shard it belongs, and its values."""
        elsewhere, self._elsewhere = self._elsewhere, {}
        inside, place = self._flat.layout.inside, self._ranks.place
        return tuple((inside(n, place)[0], elsewhere[n]) for n in sorted(elsewhere))

    def finish_scattering(self, label: str) -> None:
        """Wait for the reduce-scatter under way; its memory is free then."""
        if self._scattering is not None:
            (pending, into, memory), self._scattering = self._scattering, None
            pending.wait()
            if self._pooled:
                self._pool.give_back(memory.untyped_storage())
            self._means.append(into)
            self._average(into, label)

    def _average(self, mean: Tensor, label: str) -> None:
        replicas = self._ranks.replicas
        if self._compression is not None and not self._scatters_compressed:
            self._finish_averaging()  # what that leaves over is for this one, if it is the second
            self._averaging.append(self._compression.average(self._flat, mean, label))
        elif replicas is not None:
            self.bytes_sent += bytes_of(AllReduceMean(mean), replicas.world_size)
            task = in_place("all_reduce", mean, op=ReduceOp.MEAN)
            self._averaging.append(begin(task, replicas, label))

    def finish(self, label: str) -> None:
        """Wait until this rank has all that it is to have."""
        self.finish_scattering(label)
        self._finish_averaging()

    def _finish_averaging(self) -> None:
        averaging, self._averaging = self._averaging, []
        for pending in averaging:
            pending.wait()

    def came(self, number: int) -> bool:
        """Whether a parameter had a gradient on this rank; or has a mean here: of what compression
        had left over of earlier ones.
        """
        if number in self.used or self._compression is None:
            return number in self.used
        return any(bool(self._flat.parts(mean)[number].any()) for mean in self._means)

    @property
    def finite(self) -> bool:
        """Whether all means are."""
        return all(is_finite(mean) for mean in self._means)

    def give(self, used: set[int]) -> None:
        """Add the means to the parameters' gradients, but for those that no rank has used."""
        flat, means = self._flat, self._means
        self._means, self.used = [], set()
        for mean in means:
            parts = flat.parts(mean.to(flat.dtype))
            for number, (parameter, part) in enumerate(zip(flat.parameters, parts, strict=True)):
                if number not in used or not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = part
                else:
                    parameter.grad.add_(part)

    def forget(self) -> None:
        """Drop everything: the pass has failed. What is under way is waited for."""
        for whole in self._flat.wholes:
            whole.grad = None
        self._memory, self._views, self._means, self.used = None, [], [], set()
        self._elsewhere = {}
        scattering, self._scattering = self._scattering, None
        if scattering is not None:
            scattering[0].wait()
        self._finish_averaging()


# ------------------------------------------------------------------------------
# Gradients that a compressor averages: which of the two steps of a reduction goes compressed.
#
#                      reduce-scatter: full gradients       all-reduce: shards, between replicas
#     FULL_SHARD,      compressed, over all ranks           -
#     SHARD_GRAD_OP
#     hybrid(k)        as it is, over k ranks               compressed
#     NO_SHARD         -                                    compressed, over all ranks
#
# With `hybrid` the links between groups are the slow ones, and what crosses them is compressed;
# what goes over the fast ones is added up exactly before. So a rank has a shard's residual only.


class Awaited(Protocol):
    """What can be waited for."""

    def wait(self) -> object:
        """Block until it is done."""


class _UnderWay:
    """An average that has begun."""

    def __init__(self, exchange: RequestExecutor, under: PendingAverage | None) -> None:
        self._exchange, self._under = exchange, under

    @torch.no_grad()
    def wait(self) -> None:
        self._exchange.finish([self._under])


class Compression:
    """Of one FSDP on one rank.

    compressor   knows each gradient by its parameter's name; with `hybrid`, whose ranks have parts
                 of it only, by elements and name (`slice_key`)
    group        the ranks that average compressed gradients
    scatters     whether these are full gradients, of which each rank gets its shard
    """

    def __init__(self, compressor: Compressor, ranks: Ranks) -> None:
        self.compressor = compressor
        self.scatters = ranks.shards is not None and ranks.replicas is None
        self.group: Backend = ranks.replicas or ranks.shards or ranks.world
        self._shards = ranks.size
        self._member = Member(self.group.rank, self.group.world_size)
        self._exchange = RequestExecutor(self.group)

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""
        return self._exchange.bytes_sent

    def cut(self, flats: Iterable[Flat]) -> GradientSharding:
        """What of gradients its compressor knows on this rank."""
        if self.scatters or self._shards == 1:
            return UNSHARDED
        pieces = (key for flat in flats for key, _ in _parts(flat))
        return GradientSharding(self._shards, frozenset(pieces))

    @torch.no_grad()
    def scatter(self, flat: Flat, full: Tensor, into: Tensor, label: str) -> Awaited:
        """Begin to put this rank's shard of the mean of full gradients, padded, into `into`.

        `full` is overwritten.
        """
        bucket = GradientBucket(
            full, flat.names, [torch.Size(shape) for shape in flat.layout.shapes]
        )
        return _UnderWay(self._exchange, self._exchange.begin(self._shard(bucket, into), label))

    def _shard(self, bucket: GradientBucket, into: Tensor) -> Rounds:
        yield from self.compressor.average_shard_(bucket, self._member)
        into.copy_(bucket.shards(self._member.parts)[self._member.number])

    @torch.no_grad()
    def average(self, flat: Flat, shard: Tensor, label: str) -> Awaited:
        """Begin to overwrite a shard of gradients with the mean over the ranks that have it."""
        pieces = dict(_whole(flat) if self._shards == 1 else _parts(flat))
        size = sum(map(prod, pieces.values()))
        bucket = GradientBucket(shard[:size], list(pieces), [*map(torch.Size, pieces.values())])
        average = self.compressor.average_(bucket, self._member)
        return _UnderWay(self._exchange, self._exchange.begin(average, label))


def _whole(flat: Flat) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from zip(flat.names, flat.layout.shapes, strict=True)


def _parts(flat: Flat) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What this rank's shard has of each parameter, and its shape.

    Of a matrix the rows that are whole are one again, for compressors that look for that:

        . . x x     x x         2 of its first row
        x x x x     x x x x     2 rows
        x x x x     x x x x
        x . . .     x           1 of its last one
    """
    for number, (name, shape) in enumerate(_whole(flat)):
        start, stop = flat.layout.part(number, flat.place)
        row = prod(shape[1:])
        first, last = (-(-start // row) * row, stop // row * row) if row else (0, 0)
        cuts = (start, first, last, stop) if first < last else (start, stop)
        for low, high in pairwise(cuts):
            if low < high:
                rows = (low, high) == (first, last) and len(shape) > 0
                yield (
                    slice_key(name, low, high),
                    ((high - low) // row, *shape[1:]) if rows else (high - low,),
                )
