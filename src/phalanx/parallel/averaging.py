"""Many tensors as few messages: buckets, and their averages over ranks.

    bucket 0                     bucket 1
    [ head.bias | head.weight ]  [ body.bias | body.weight ]   flat memory, one dtype each

Each gradient is a view into its bucket, so it is averaged in place: by one all-reduce, or a
compressor's messages. If ranks share memory, each reduces a slice of a bucket. No other rank reads
this one's contribution to its own slice, which stays in the memory that autograd has given it:

    rank 0's bucket   [ own slice: the mean    | copied, for rank 1       ]
    rank 1's bucket   [ copied, for rank 0     | own slice: the mean      ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from phalanx.collectives import (
    PendingCollective,
    ReduceOp,
    async_all_gather,
    async_all_reduce_,
    async_all_to_all,
    broadcast_,
)
from phalanx.collectives.pieces import Pieces
from phalanx.collectives.reductions import async_reduce_overwriting_, async_reduce_scatter_pieces
from phalanx.collectives.resolve import TensorRequest
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
from phalanx.errors import UnsupportedOperationError

MESSAGE = 25 << 20  # bytes that are sent as one message, if nothing else is asked for
LARGE = 1 << 20  # bytes from which on it pays to leave this rank's own slice in pieces


def weigh_(tensor: Tensor, factor: float) -> Tensor:
    """Multiply in place. With 0 all becomes 0, NaN too: it reaches no other rank."""
    return tensor if factor == 1 else tensor.mul_(factor) if factor else tensor.zero_()


class Bucket:
    """Flat memory for tensors of the sizes of some others, such as gradients; of one dtype.

    views    for each tensor its place in `flat`, in its shape
    pieces   of values not in `flat` yet: the first element of their place, and the values
    owner    the rank that gets the mean alone; None: all ranks get it
    """

    pieces: Mapping[int, Tensor] = MappingProxyType({})
    owner: int | None = None

    def __init__(self, tensors: Sequence[Tensor], backend: Backend) -> None:
        count, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.flat = backend.empty(count, dtype=first.dtype, device=first.device)
        self.views: dict[Tensor, Tensor] = {}
        start = 0
        for tensor in tensors:
            stop = start + tensor.numel()
            self.views[tensor] = self.flat[start:stop].view(tensor.shape)
            start = stop


def copy_others_part(place: Tensor, values: Tensor, first: int, last: int) -> Tensor:
    """Copy contiguous values but for elements `first` to `last`, which are returned: this rank's.

    Nobody else reads these: they are reduced in place.
    """
    flat, values = place.view(-1), values.view(-1)
    flat[:first].copy_(values[:first])
    flat[last:].copy_(values[last:])
    return values[first:last]


def batches(
    tensors: Iterable[Tensor], size: int, owners: Mapping[Any, int] = MappingProxyType({})
) -> Iterator[list[Tensor]]:
    """Cut tensors into runs of one dtype, device and owner, and at most `size` bytes, or one."""
    by_kind: dict[tuple[torch.dtype, torch.device, int | None], list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device, owners.get(tensor)
        by_kind.setdefault(kind, []).append(tensor)
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


def least_sent(backend: Backend, algorithm: str) -> str:
    """Return this algorithm, which sends the least there is, or `auto` where others know better:
    in shared memory, with several ranks on each of several hosts, in a library of its own.
    """
    if backend.native is not None or backend.shares_memory:
        return "auto"
    return algorithm if len(set(backend.topology)) in (1, backend.world_size) else "auto"


@torch.no_grad()
def broadcast_all_(
    tensors: Sequence[Tensor], backend: Backend, root: int, *, label: str = ""
) -> None:
    """Overwrite tensors with those of rank `root`, in place: their storage stays the same.

    label   its name in errors; the same on every rank

    Raises `UnsupportedOperationError`, with nothing sent, if one is on the meta device.
    """
    if backend.world_size == 1:
        return
    if any(tensor.is_meta for tensor in tensors):
        raise UnsupportedOperationError(
            f"rank {backend.rank}: parameters and buffers should be like those of rank {root}, and "
            "this rank was given one on meta, without values: build the model with values, or call "
            "to_empty(device='cpu') and load a state; FSDP takes models on the meta device"
        )
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

    rounds    of the compressor; None if there is no more to do than to wait, whatever its result
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

        label   its name in errors: ranks whose labels differ do not mean the same
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
            pending = async_reduce_scatter_pieces(
                Pieces(given), backend, ReduceOp.MEAN, label=label
            )
            shape = shape[1:]
        elif isinstance(request, AllGather):
            pending = async_all_gather(given.unsqueeze(0), backend, label=label)
            shape = torch.Size((backend.world_size, *shape))
        else:
            pending = async_all_to_all(given, backend, label=label)
        return PendingAverage(rounds, pending, shape, label)


def bytes_of(request: Request, ranks: int) -> int:
    """Return the bytes that each rank sends for a request."""
    if isinstance(request, AllGather):
        return (ranks - 1) * request.tensor.nbytes
    times = 2 if isinstance(request, AllReduceMean) else 1
    return times * (ranks - 1) * request.tensor.nbytes // ranks


class GradientAveraging(RequestExecutor):
    """Averages buckets over the ranks, in place.

    begin_bucket  a bucket is full: start the work that can be done while backward goes on
    finish        the pass is over: wait for all that has begun; then buckets hold averages
    end_pass      it is known whether the step counts
    means_of      all of this for some tensors

    compressor   averages in its own form; its arithmetic before its first message runs in
                 `begin_bucket`, the rest at the end, all buckets' messages of a round together.
                 None: an all-reduce
    names        by which the compressor knows the gradients of parameters
    feedback     takes the values that the compressor leaves out, unless that keeps them itself
    reproducible without a compressor: add up in rank order, whatever the backend and the sizes
    """

    def __init__(
        self,
        backend: Backend,
        compressor: Compressor | None = None,
        names: Mapping[Tensor, str] | None = None,
        *,
        feedback: ResidualStore = NO_RESIDUALS,
        reproducible: bool = False,
    ) -> None:
        super().__init__(backend, compressor)
        self._algorithm = "direct" if reproducible else "auto"
        self._names = names or {}
        self._feedback = feedback
        self._member = Member(backend.rank, backend.world_size)

    def regrouped(self) -> None:
        """Average over the ranks that the backend has now, and count bytes anew."""
        self.bytes_sent = 0
        self._member = Member(self._backend.rank, self._backend.world_size)

    @property
    def in_pieces(self) -> bool:
        """True if this rank's own slice of a bucket is read from autograd's memory."""
        backend = self._backend
        return self.compressor is None and backend.native is None and backend.shares_memory

    def begin_bucket(self, bucket: Bucket, label: str) -> PendingAverage | None:
        """Begin to average with the buckets of that label on the other ranks."""
        flat = bucket.flat
        if bucket.owner is not None:
            return self._begin_reduce(flat, bucket.owner, label)
        if self.compressor is None:  # the way of most gradients: no other function in between
            self.bytes_sent += 2 * (self._member.parts - 1) * flat.nbytes // self._member.parts
            # Of the backend's own memory: not to be checked in each pass, as a user's tensor is.
            options = (self._algorithm, False, label, None)
            request = TensorRequest.all_reduce_(
                flat, self._backend, ReduceOp.MEAN, partial(increment_version, flat), options
            )
            request.elsewhere = tuple(sorted(bucket.pieces.items()))
            bucket.pieces = {}
            return PendingAverage(None, request.issue(), flat.shape, label)
        names = [self._names[parameter] for parameter in bucket.views]
        named = GradientBucket(flat, names, [parameter.shape for parameter in bucket.views])
        return self.begin(self.compressor.average_(named, self._member, self._feedback), label)

    def _begin_reduce(self, flat: Tensor, owner: int, label: str) -> PendingAverage:
        backend, exact = self._backend, self._algorithm != "auto"
        self.bytes_sent += flat.nbytes if backend.rank != owner else 0
        algorithm = self._algorithm if exact else least_sent(backend, "tree")
        pending = async_reduce_overwriting_(
            flat, backend, owner, ReduceOp.MEAN, algorithm=algorithm, label=label
        )
        return PendingAverage(None, pending, flat.shape, label)

    def end_pass(self, averaged: Sequence[Bucket], *, skipped: bool) -> None:
        """End the pass, which has these averages; its step counts unless it is skipped.

        A step that is skipped leaves the compressor's state as it was. So does one whose averages
        are not finite, on every rank alike: a gradient scaler skips it.
        """
        if self.compressor is not None:
            finite = all(is_finite(bucket.flat) for bucket in averaged)
            self.compressor.end_pass(counts=finite and not skipped)

    @torch.no_grad()
    def means_of(
        self,
        tensors: Iterable[Tensor],
        *,
        label: str,
        put: Callable[[Tensor, Tensor], object] = torch.Tensor.copy_,
        share: float = 1.0,
        kept: Mapping[Tensor, Tensor] | None = None,
    ) -> list[Bucket]:
        """Return the means of tensors over the ranks, in new memory; blocks until they are there.

        put    `put(place, tensor)` writes the values to average of a tensor into its place
        label  its name in errors; ranks whose labels differ do not mean the same
        share  how much this rank's values count; 1 on average over the ranks
        kept   by tensor, the part of its values that counts as it is

        All messages are under way together. The results are the same bits on every rank.
        """
        buckets, begun = [], []
        for number, batch in enumerate(batches(tensors, MESSAGE)):
            bucket = Bucket(batch, self._backend)
            for tensor, place in bucket.views.items():
                put(place, tensor)
                weigh_(place, share)
                if kept and share != 1 and tensor in kept:
                    place.add_(kept[tensor], alpha=1 - share)
            buckets.append(bucket)
            begun.append(self.begin_bucket(bucket, f"{label}, part {number}"))
        self.finish(begun)
        self.end_pass(buckets, skipped=False)
        return buckets


# ------------------------------------------------------------------------------
# Sparse gradients: of a table, the rows that are in a rank's batch. They are in no bucket.
#
#     rank 0   rows 3 7   \
#                          all_gather   rows 3 7 7 9   ->   3 7 9, equal ones added
#     rank 1   rows 7 9   /


def average_rows_(parameter: Tensor, ranks: int, divisor: int) -> Rounds:
    """Make `.grad` the sum over the ranks, divided; new, coalesced, the same bits on every rank.

    None has no rows. If a rank's is dense (a tied weight) the result is. Gathered are 8 bytes, then
    numbers of rows, then rows: as many of each rank as the one with the most has.
    """
    grad, shape = parameter.grad, parameter.shape
    rows, values = parameter.new_zeros(0, dtype=torch.int64), parameter.new_zeros(0, *shape[1:])
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values() / divisor
    dense = grad is not None and not grad.is_sparse
    counts = yield AllGather(torch.tensor([-1 if dense else len(rows)]))
    if int(counts.min()) < 0:
        whole = torch.zeros_like(parameter) if grad is None else grad.to_dense()
        parameter.grad = (yield AllReduceMean(whole)).mul_(ranks / divisor)
        return
    most = int(counts.max())
    sent = (torch.arange(most) < counts).to(rows.device)
    rows = yield AllGather(torch.cat([rows, rows.new_zeros(most - len(rows))]))
    values = yield AllGather(torch.cat([values, values.new_zeros(most - len(values), *shape[1:])]))
    found = rows[sent][None], values[sent]
    parameter.grad = torch.sparse_coo_tensor(*found, shape, check_invariants=True).coalesce()


class RowGradient(Bucket):
    """A gradient of such a parameter, for those who look into buckets at their gradients."""

    def __init__(self, parameter: Tensor) -> None:
        grad = parameter.grad if parameter.grad is not None else parameter.new_zeros(0)
        self.flat = grad._values() if grad.is_sparse else grad
        self.views = {parameter: self.flat}
