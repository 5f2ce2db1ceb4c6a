"""The reduction of unsharded parameters' gradients to those of shards.

    autograd gives a parameter's gradient    accumulate   copied to flat memory, and dropped
    all of the flat memory's are there       reduce       reduce-scatter: the mean of this shard
    ... between replicas                                  all-reduce of that shard
                                                          (one of the two by a compressor, perhaps)
    the end of the backward pass             finalize     the parameters' .grad

So no full gradient lives longer than until its group is reduced. Under `no_sync` autograd's own
stay, and are added up there.

Full gradients take memory until they are reduced, so no more than one group's are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from phalanx.collectives import (
    PendingCollective,
    ReduceOp,
    async_all_reduce_,
)
from phalanx.collectives.pieces import Pieces
from phalanx.collectives.reductions import async_reduce_scatter_pieces, reduce_scatter_pieces
from phalanx.compression import Compressor
from phalanx.compression.compressor import (
    AllReduceMean,
    GradientBucket,
    Member,
    ReduceScatterMean,
    is_finite,
)
from phalanx.compression.error_feedback import slice_key
from phalanx.core.backend import Backend
from phalanx.fsdp.flat_param import FlatParameter, ShardingPlan
from phalanx.parallel.averaging import LARGE, RequestExecutor, bytes_of, copy_others_part
from phalanx.parallel.compressor_state import UNSHARDED, GradientSharding
from phalanx.parallel.gradient_parts import mark_part
from phalanx.torch_internals import as_plain_tensors, gradient_hooks, post_accumulate_hooks

Wait = Callable[[], object]  # blocks until what has begun is done


class FlatGradient:
    """Gradients of one flat parameter, in one backward pass.

    used         the numbers of parameters that have had a gradient on this rank
    bytes_sent   by this rank so far, without compressed ones, as rings and direct messages do
    """

    def __init__(self, flat: FlatParameter, compression: CompressedReduction | None) -> None:
        self.flat = flat
        self.bytes_sent = 0
        self._plan = plan = flat.plan
        self._compression = compression
        self._scatters = compression is not None and compression.scatters
        shards = plan.shards  # where memory is shared, others read it: it is the backend's
        read = shards is not None and shards.shares_memory and not self._scatters
        self._pooled = shards is not None and not read and flat.device.type == "cpu"
        self._dtype = flat.compute_dtype
        if plan.precision is not None and flat.dtype.is_floating_point:
            self._dtype = plan.precision.reduce_dtype
        self._leaves_own = read and flat.layout.padded * self._dtype.itemsize >= LARGE
        self._clear()
        self._scattering: tuple[Wait, Tensor, Tensor] | None = None
        self._averaging: list[Wait] = []

    def _clear(self) -> None:
        self._memory: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing: set[int] = set()
        self._elsewhere: dict[int, Tensor] = {}
        self._means: list[Tensor] = []
        self.used: set[int] = set()

    # Gradients of autograd ------------------------------------------------------------------

    def accumulate(self, number: int) -> None:
        """Take in autograd's gradient of a parameter, which is gone then."""
        if self._memory is None:
            self._allocate()
        view = self.flat.views[number]
        with as_plain_tensors():
            grad, view.grad = view.grad, None
        if grad is None:
            return
        if grad.layout is not torch.strided:  # shards' gradients are dense
            grad = grad.to_dense()
        place = self._views[number]
        kept = self._elsewhere.pop(number, None)
        start, stop = self.flat.layout.part(number, self._plan.shard_index)
        if number not in self._missing:  # a second time, before the others' first
            if kept is not None:
                place.view(-1)[start:stop].copy_(kept)
            place.add_(grad)
        elif self._leaves_own and grad.dtype is self._dtype and grad.is_contiguous():
            own = copy_others_part(place, grad, start, stop)
            if start < stop:
                self._elsewhere[number] = own
        else:
            place.copy_(grad)
        self._missing.discard(number)
        self.used.add(number)

    @property
    def owes(self) -> bool:
        """True if there are gradients that are not reduced."""
        return self._memory is not None or bool(self._accumulated())

    def _accumulated(self) -> list[int]:
        """Return the numbers of parameters of which autograd has a gradient."""
        with as_plain_tensors():
            return [at for at, view in enumerate(self.flat.views) if view.grad is not None]

    def drop_accumulated(self) -> None:
        """Drop the gradients that autograd has added up."""
        for view in self.flat.views:
            view.grad = None

    def _allocate(self) -> Tensor:
        flat, plan = self.flat, self._plan
        count = flat.layout.padded
        if self._pooled:
            memory = plan.pool.empty(count, self._dtype)
        else:
            backend = plan.shards or plan.replicas or plan.world
            memory = backend.empty(count, dtype=self._dtype, device=flat.device)
        self._memory = memory
        memory[flat.layout.total :].zero_()
        self._views = flat.split(memory)
        self._missing = set(range(len(self._views)))
        return memory

    # The mean over the ranks ----------------------------------------------------------------

    def reduce(self) -> None:
        """Begin to average with the other ranks; parameters without a gradient count as zeros."""
        for number in self._accumulated():  # in earlier passes that were not reduced
            self.accumulate(number)
        if not any(parameter.requires_grad for parameter in self.flat.parameters):
            return
        memory = self._memory if self._memory is not None else self._allocate()
        for number in self._missing:
            self._views[number].zero_()
        self._memory, self._views = None, []
        shards, replicas = self._plan.shards, self._plan.replicas
        if shards is None:
            self._average(memory)
            return
        size, device = self.flat.layout.shard, self.flat.device
        into = (replicas or shards).empty(size, dtype=self._dtype, device=device)
        self._scattering = self._scatter(shards, memory, into), into, memory
        if not shards.spares_a_processor:
            self.finish_scattering()

    def _scatter(self, shards: Backend, memory: Tensor, into: Tensor) -> Wait:
        label = f"FSDP reduces {self.flat.label}"
        if self._scatters and self._compression is not None:
            return self._compression.begin(self.flat, memory, into, label)
        self.bytes_sent += bytes_of(ReduceScatterMean(memory), shards.world_size)
        layout, index = self.flat.layout, self._plan.shard_index
        starts = [layout.shard * index + layout.inside(n, index)[0] for n in self._elsewhere]
        elsewhere = tuple(sorted(zip(starts, self._elsewhere.values(), strict=True)))
        self._elsewhere = {}
        # Where nobody else moves it on: sooner done, sooner freed.
        scatter = (
            async_reduce_scatter_pieces if shards.spares_a_processor else reduce_scatter_pieces
        )
        pending = scatter(
            Pieces(memory, elsewhere),
            shards,
            ReduceOp.MEAN,
            algorithm=self._plan.algorithm,
            into=into,
            label=label,
        )
        return pending.wait if isinstance(pending, PendingCollective) else lambda: None

    def finish_scattering(self) -> None:
        """Wait for the reduce-scatter under way; its memory is free then."""
        if self._scattering is not None:
            (wait, into, memory), self._scattering = self._scattering, None
            wait()
            if self._pooled:
                self._plan.pool.give_back(memory.untyped_storage())
            self._average(into)

    def _average(self, mean: Tensor) -> None:
        """Average with the replicas, if there are any."""
        self._means.append(mean)
        replicas, label = self._plan.replicas, f"FSDP averages {self.flat.label}"
        if self._compression is not None and not self._scatters:
            self._finish_averaging()  # what that leaves over is for this one, if it is the second
            self._averaging.append(self._compression.begin(self.flat, mean, mean, label))
        elif replicas is not None:
            self.bytes_sent += bytes_of(AllReduceMean(mean), replicas.world_size)
            averaging = async_all_reduce_(mean, replicas, ReduceOp.MEAN, label=label)
            self._averaging.append(averaging.wait)

    def finish(self) -> None:
        """Wait until this rank has all of its means."""
        self.finish_scattering()
        self._finish_averaging()

    def _finish_averaging(self) -> None:
        averaging, self._averaging = self._averaging, []
        for wait in averaging:
            wait()

    # Gradients of parameters ----------------------------------------------------------------

    def has_mean(self, number: int) -> bool:
        """Return whether a parameter had a gradient on this rank; or has a mean here, from the
        compressor's residual of earlier ones.
        """
        if number in self.used or self._compression is None:
            return number in self.used
        return any(bool(self.flat.split_shard(mean)[number].any()) for mean in self._means)

    @property
    def finite(self) -> bool:
        """True if all means are finite."""
        return all(is_finite(mean) for mean in self._means)

    def finalize(self, used: Sequence[bool], scale: float = 1.0) -> list[nn.Parameter]:
        """Add the mean, scaled, to the gradients of the parameters that some rank has used: these.

        Their own hooks (`Tensor.register_hook`) get this rank's part of the mean before, and may
        return another one.
        """
        flat, means = self.flat, [mean.to(self.flat.dtype) for mean in self._means]
        self._means, self.used = [], set()
        if not means:
            return []
        for mean in means[1:]:  # of a reentrant checkpoint
            means[0].add_(mean)
        if scale != 1.0:
            means[0].mul_(scale)
        parts = zip(flat.parameters, flat.split_shard(means[0]), used, strict=True)
        reached = [(p, part) for p, part, any_rank in parts if any_rank and p.requires_grad]
        for parameter, part in reached:
            new = part
            for hook in gradient_hooks(parameter):
                other = hook(new)
                new = new if other is None else other
            if parameter.grad is None:
                parameter.grad = new
            else:
                parameter.grad.add_(new)
            if flat.plan.shards is not None:
                mark_part(parameter)
        return [parameter for parameter, _ in reached]

    def abandon(self) -> None:
        """Drop everything: the pass has failed. Waits for reductions under way."""
        scattering, averaging = self._scattering, self._averaging
        self.drop()
        for wait in [*([scattering[0]] if scattering is not None else []), *averaging]:
            wait()

    def drop(self) -> None:
        """Drop everything, and wait for nothing: what is under way is of a group that is over."""
        self.drop_accumulated()
        self._clear()
        self._scattering, self._averaging = None, []


@torch.no_grad()
def call_post_accumulate_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Call hooks of `Tensor.register_post_accumulate_grad_hook`: `.grad` is final now."""
    for parameter in parameters:
        for hook in post_accumulate_hooks(parameter):
            hook(parameter)


# Compression ------------------------------------------------------------------------------------


class CompressedReduction:
    """One of the two steps of a reduction by a compressor, for one FSDP on one rank.

                         reduce-scatter: full gradients       all-reduce: shards, between replicas
        FULL_SHARD,      compressed, over all ranks           -
        SHARD_GRAD_OP
        hybrid(k)        as it is, over k ranks               compressed
        NO_SHARD         -                                    compressed, over all ranks

    With `hybrid` the links between shard groups are the slow ones, and gradients are compressed
    there; over the fast ones they are added up exactly before. So a rank has a shard's residual
    only.

    compressor   knows each gradient by its parameter's name; with `hybrid`, whose ranks have parts
                 of it only, by elements and name (`slice_key`)
    scatters     whether it is the reduce-scatter, of which each rank gets its shard
    exchange     executes the compressor's requests
    """

    def __init__(self, compressor: Compressor, plan: ShardingPlan) -> None:
        self.compressor = compressor
        self.scatters = plan.shards is not None and plan.replicas is None
        backend = plan.replicas or plan.shards or plan.world
        self.exchange = RequestExecutor(backend)
        self._shards = plan.shards_per_copy
        self._part = Member(backend.rank, backend.world_size)

    def cut(self, flats: Iterable[FlatParameter]) -> GradientSharding:
        """Return the parts of gradients that its compressor has on this rank."""
        if self.scatters or self._shards == 1:
            return UNSHARDED
        return GradientSharding(
            self._shards, frozenset(key for flat in flats for key in self._pieces(flat))
        )

    @torch.no_grad()
    def begin(self, flat: FlatParameter, memory: Tensor, into: Tensor, label: str) -> Wait:
        """Begin to overwrite a shard of gradients with the mean over the ranks that have it; or, as
        the reduce-scatter, `into` with this rank's shard of the mean of full gradients, padded,
        which are overwritten.
        """
        shapes = self._pieces(flat)
        size = len(memory) if self.scatters else sum(map(prod, shapes.values()))
        bucket = GradientBucket(memory[:size], list(shapes), [*map(torch.Size, shapes.values())])
        compressor = self.compressor
        average = compressor.average_shard_ if self.scatters else compressor.average_
        under_way = [self.exchange.begin(average(bucket, self._part), label)]

        @torch.no_grad()
        def wait() -> None:
            self.exchange.finish(under_way)
            if self.scatters:
                into.copy_(bucket.shards(self._part.parts)[self._part.number])

        return wait

    def _pieces(self, flat: FlatParameter) -> dict[str, tuple[int, ...]]:
        """Return this rank's pieces of each parameter before it is averaged, and their shapes.

        Whole rows of a matrix are a matrix again, for compressors that look for one:

            . . x x     x x         2 of its first row
            x x x x     x x x x     2 rows
            x x x x     x x x x
            x . . .     x           1 of its last one
        """
        whole = dict(zip(flat.names, flat.layout.shapes, strict=True))
        if self._shards == 1 or self.scatters:
            return whole
        pieces: dict[str, tuple[int, ...]] = {}
        for number, (name, shape) in enumerate(whole.items()):
            start, stop = flat.layout.part(number, flat.plan.shard_index)
            row = prod(shape[1:])
            first, last = (-(-start // row) * row, stop // row * row) if row else (0, 0)
            cuts = (start, first, last, stop) if first < last else (start, stop)
            for low, high in pairwise(cuts):
                if low < high:
                    rows = (low, high) == (first, last) and len(shape) > 0
                    size = ((high - low) // row, *shape[1:]) if rows else (high - low,)
                    pieces[slice_key(name, low, high)] = size
        return pieces
