"""Many tensors as few messages: buckets, and their averages over ranks.

    bucket 0                     bucket 1
    [ head.bias | head.weight ]  [ body.bias | body.weight ]   flat memory, one dtype each

Each gradient is a view into its bucket, so that it is averaged where it lies: by one all-reduce, or
a compressor's messages. Where ranks can read each other's memory, no bucket has memory of its own:
gradients are averaged where autograd has put them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.collectives import (
    PendingCollective,
    ReduceOp,
    async_all_gather,
    async_all_reduce_,
    async_all_reduce_coalesced_,
    async_all_to_all,
    async_reduce_scatter,
    broadcast_,
)
from phalanx.collectives.reductions import reduces_in_place
from phalanx.compression import Compressor
from phalanx.compression.compressor import (
    NO_RESIDUALS,
    AllGather,
    AllReduceMean,
    GradientBucket,
    Member,
    ReduceScatterMean,
    Request,
    ResidualStore,
    Rounds,
    is_finite,
)
from phalanx.core.backend import Backend

MESSAGE = 25 << 20  # bytes that are sent as one message, if nothing else is asked for


class Bucket:
    """Flat memory for tensors of the sizes of some others, such as gradients; of one dtype.

    views       for each tensor its place in `flat`, in its shape
    parameters  the tensors; where they are parameters, their gradients come into the bucket
    pending     those whose gradients have not come in this pass
    """

    def __init__(self, tensors: Sequence[Tensor], backend: Backend) -> None:
        count, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.flat = backend.empty(count, dtype=first.dtype, device=first.device)
        self.views: dict[Tensor, Tensor] = {}
        start = 0
        for tensor in tensors:
            stop = start + tensor.numel()
            self.views[tensor] = self.flat[start:stop].view(tensor.shape)
            start = stop
        self.parameters, self.pending = tensors, set(tensors)

    def put(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete: make it (None are zeros) a view of the bucket."""
        grad, view = parameter.grad, self.views[parameter]
        if grad is None:
            view.zero_()
        elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            view.copy_(grad.detach())  # which has a graph after backward(create_graph=True)
        parameter.grad = view

    def scale_(self, factor: float) -> None:
        """Multiply all gradients, in place."""
        self.flat.mul_(factor)


class BucketInPlace:
    """Gradients that are averaged together where autograd has put them, in no other memory."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.pending = set(parameters)

    def put(self, parameter: Tensor) -> None:
        """A gradient is complete: see to it that it can be averaged in place. None are zeros."""
        grad = parameter.grad
        if grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        elif grad.requires_grad:  # after backward(create_graph=True), which keeps its values
            parameter.grad = grad.detach().clone(memory_format=torch.contiguous_format)
        elif not grad.is_contiguous():
            parameter.grad = grad.contiguous()

    def gradients(self) -> list[Tensor]:
        """All of them, once they are complete."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def scale_(self, factor: float) -> None:
        """Multiply all gradients, in place."""
        for gradient in self.gradients():
            gradient.mul_(factor)


def batches(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cut a list of tensors into runs of one kind and at most `size` bytes (or one tensor)."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        batch: list[Tensor] = []
        filled = 0
        for tensor in same:
            if batch and filled + tensor.nbytes > size:
                yield batch
                batch, filled = [], 0
            batch.append(tensor)
            filled += tensor.nbytes
        yield batch


@torch.no_grad()
def broadcast_all_(
    tensors: Sequence[Tensor], backend: Backend, root: int, *, label: str = ""
) -> None:
    """Overwrite tensors with those of rank `root`, in place: their storage stays the same.

    label   says in errors what this is; the same on every rank
    """
    if backend.world_size == 1:
        return
    for batch in batches(tensors, MESSAGE):
        bucket = Bucket(batch, backend)
        torch.cat([tensor.detach().reshape(-1) for tensor in batch], out=bucket.flat)
        broadcast_(bucket.flat, backend, root, label=label)
        if backend.rank != root:
            for tensor, view in bucket.views.items():
                tensor.copy_(view)


# ------------------------------------------------------------------------------
# Averages.


class PendingAverage(NamedTuple):
    """An average that is under way.

    rounds    of the compressor; None if there is no more to do than to wait
    pending   the collective that the next round waits for
    shape     of the tensor that the rounds go on with
    """

    rounds: Rounds | None
    pending: PendingCollective[Any]
    shape: torch.Size
    label: str


class RequestExecutor:
    """Executes the requests of compressors with the collectives of a backend.

    bytes_sent   bytes that this rank has sent so far, as rings and direct messages send them. For
                 p ranks: 2(p-1)/p of the bytes of an `AllReduceMean`, (p-1)/p of a
                 `ReduceScatterMean` or an `AllToAll`, p-1 times those of an `AllGather`
    compressor   is rolled back if a request fails, if it is known
    """

    def __init__(self, backend: Backend, compressor: Compressor | None = None) -> None:
        self.bytes_sent = 0
        self.compressor = compressor
        self._backend = backend

    def begin(self, rounds: Rounds, label: str) -> PendingAverage | None:
        """Do the arithmetic before the first request and start that, in the background. None if
        there is no request.

        label   what it is, in errors: ranks whose labels differ do not mean the same
        """
        request = next(rounds, None)
        return None if request is None else self._start(rounds, request, label)

    def finish(self, averages: Sequence[PendingAverage | None]) -> None:
        """Wait, and execute all requests that are left: round after round, each of all averages, so
        that their messages overlap; in the same order on every rank. Blocks. Raises the first error
        of a round, after all of it ended.
        """
        under_way = [average for average in averages if average is not None]
        try:
            while under_way:
                following: list[PendingAverage] = []
                problem: Exception | None = None
                for rounds, pending, shape, label in under_way:
                    try:
                        result = pending.wait()
                        if rounds is not None and problem is None:
                            request = rounds.send(result.view(shape))
                            following.append(self._start(rounds, request, label))
                    except StopIteration:
                        pass
                    except Exception as error:
                        problem = problem or error
                if problem is not None:
                    raise problem
                under_way = following
        except BaseException:
            if self.compressor is not None:
                self.compressor.rollback()
            raise

    def _start(self, rounds: Rounds, request: Request, label: str) -> PendingAverage:
        backend, given = self._backend, request.tensor.contiguous()
        self.bytes_sent += bytes_of(request, backend.world_size)
        shape = given.shape
        if isinstance(request, AllReduceMean):
            pending = async_all_reduce_(given, backend, ReduceOp.MEAN, label=label)
        elif isinstance(request, ReduceScatterMean):
            pending = async_reduce_scatter(given, backend, ReduceOp.MEAN, consume=True, label=label)
            shape = shape[1:]
        elif isinstance(request, AllGather):
            pending = async_all_gather(given.unsqueeze(0), backend, label=label)
            shape = torch.Size((backend.world_size, *shape))
        else:
            pending = async_all_to_all(given, backend, label=label)
        return PendingAverage(rounds, pending, shape, label)


def bytes_of(request: Request, ranks: int) -> int:
    """Bytes that each rank sends for a request."""
    if isinstance(request, AllGather):
        return (ranks - 1) * request.tensor.nbytes
    times = 2 if isinstance(request, AllReduceMean) else 1
    return times * (ranks - 1) * request.tensor.nbytes // ranks


class GradientAveraging(RequestExecutor):
    """Averages buckets over the ranks, in place.

    begin_bucket  a bucket is full: start what can be done while backward goes on
    finish        the pass is over: wait for all that has begun; then buckets hold averages
    settle        it is known whether the step counts
    means_of      all of this for some tensors

    compressor   averages in its own form; its arithmetic before its first message runs in
                 `begin_bucket`, the rest at the end, all buckets' messages of a round together.
                 None: an all-reduce
    names        by which the compressor knows the gradients of parameters
    feedback     is told what the compressor leaves out, unless the compressor keeps that itself
    """

    def __init__(
        self,
        backend: Backend,
        compressor: Compressor | None = None,
        names: Mapping[Tensor, str] | None = None,
        *,
        feedback: ResidualStore = NO_RESIDUALS,
    ) -> None:
        super().__init__(backend, compressor)
        self._names = names or {}
        self._feedback = feedback
        self._member = Member(backend.rank, backend.world_size)

    def in_place(self, parameters: Sequence[Tensor]) -> bool:
        """Whether gradients of these, of one dtype, need no bucket with memory of its own."""
        return self.compressor is None and reduces_in_place(parameters, self._backend)

    def begin_bucket(self, bucket: Bucket | BucketInPlace, label: str) -> PendingAverage | None:
        """Begin to average with the buckets of that label on the other ranks."""
        backend, parts = self._backend, self._member.parts
        if isinstance(bucket, BucketInPlace):
            grads = bucket.gradients()
            self.bytes_sent += 2 * (parts - 1) * sum(grad.nbytes for grad in grads) // parts
            listed = async_all_reduce_coalesced_(grads, backend, ReduceOp.MEAN, label=label)
            return PendingAverage(None, listed, torch.Size(), label)
        flat = bucket.flat
        if self.compressor is None:  # the way of most gradients: no other function in between
            self.bytes_sent += 2 * (parts - 1) * flat.nbytes // parts
            pending = async_all_reduce_(flat, backend, ReduceOp.MEAN, label=label)
            return PendingAverage(None, pending, flat.shape, label)
        names = [self._names[parameter] for parameter in bucket.views]
        named = GradientBucket(flat, names, [parameter.shape for parameter in bucket.views])
        return self.begin(self.compressor.average_(named, self._member, self._feedback), label)

    def settle(self, averaged: Sequence[Bucket], *, skipped: bool) -> None:
        """The pass is over: these are its averages, and its step counts unless it is skipped.

        A step that is skipped leaves the compressor's state as it was. So does one whose averages
        are not finite, on every rank alike: a gradient scaler skips it.
        """
        if self.compressor is None:
            return
        if skipped or not all(is_finite(bucket.flat) for bucket in averaged):
            self.compressor.rollback()
        else:
            self.compressor.commit()

    @torch.no_grad()
    def means_of(
        self,
        tensors: Iterable[Tensor],
        *,
        label: str,
        put: Callable[[Tensor, Tensor], object] = torch.Tensor.copy_,
    ) -> list[Bucket]:
        """The means of tensors over the ranks, in new memory; blocks until they are there.

        put    `put(place, tensor)` writes what is to be averaged of a tensor into its place
        label  says in errors what this is; ranks whose labels differ do not mean the same

        All messages are under way together. The results are the same bits on every rank.
        """
        buckets, begun = [], []
        for number, batch in enumerate(batches(tensors, MESSAGE)):
            bucket = Bucket(batch, self._backend)
            for tensor, place in bucket.views.items():
                put(place, tensor)
            buckets.append(bucket)
            begun.append(self.begin_bucket(bucket, f"{label}, part {number}"))
        self.finish(begun)
        self.settle(buckets, skipped=False)
        return buckets
