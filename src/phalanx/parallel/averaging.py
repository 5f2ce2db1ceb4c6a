"""Strategies to average gradients over ranks: one all-reduce each, or a compressor's messages.

begin    a bucket is full: start what can be done while backward goes on
finish   the pass is over: wait for all that has begun; afterwards buckets hold averages
settle   it is known whether the step counts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from phalanx.collectives import (
    PendingCollective,
    ReduceOp,
    async_all_gather,
    async_all_reduce_,
    async_all_to_all,
    async_reduce_scatter,
)
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


class FlatGradients(Protocol):
    """Gradients of some parameters, one after the other in flat memory."""

    parameters: list[nn.Parameter]
    flat: Tensor


class GradientAveraging(Protocol):
    """Averages gradients over the ranks, in place."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far, as rings and direct messages send them."""

    def begin(self, gradients: FlatGradients, label: str) -> Any:
        """Begin to average with those of that label on the other ranks; a handle for `finish`."""

    def finish(self, begun: Sequence[Any]) -> None:
        """Wait for all of them. Raises the first error, after all ended."""

    def settle(self, averaged: Sequence[FlatGradients], *, skipped: bool) -> None:
        """The pass is over: these are its averages, and its step counts unless it is skipped."""


class AllReduceAveraging:
    """Averages by one all-reduce each, in the background."""

    def __init__(self, backend: Backend) -> None:
        self.bytes_sent = 0
        self._backend = backend

    def begin(self, gradients: FlatGradients, label: str) -> PendingCollective[Tensor]:
        """Start the all-reduce."""
        ranks = self._backend.world_size
        self.bytes_sent += 2 * (ranks - 1) * gradients.flat.nbytes // ranks
        return async_all_reduce_(gradients.flat, self._backend, ReduceOp.MEAN, label=label)

    def finish(self, begun: Sequence[PendingCollective[Tensor]]) -> None:
        """Wait for all of them."""
        problem: BaseException | None = None
        for pending in begun:
            try:
                pending.wait()
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def settle(self, averaged: Sequence[FlatGradients], *, skipped: bool) -> None:
        """Nothing depends on whether the step counts."""


class CompressedAveraging:
    """Averages by a compressor, which knows each gradient by its parameter's name.

    The compressor's arithmetic before its first message runs when the bucket is full, inside of
    backward; the rest runs at the end, all buckets' messages of a round together.

    feedback   is told what the compressor leaves out, unless the compressor keeps that itself
    """

    def __init__(
        self,
        compressor: Compressor,
        names: Mapping[nn.Parameter, str],
        backend: Backend,
        *,
        feedback: ResidualStore = NO_RESIDUALS,
    ) -> None:
        self.compressor = compressor
        self._feedback = feedback
        self._names = names
        self._executor = RequestExecutor(backend)
        self._member = Member(backend.rank, backend.world_size)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return self._executor.bytes_sent

    @torch.no_grad()
    def begin(self, gradients: FlatGradients, label: str) -> PendingAverage | None:
        """Compress, and start the first request."""
        bucket = GradientBucket(
            gradients.flat,
            [self._names[parameter] for parameter in gradients.parameters],
            [parameter.shape for parameter in gradients.parameters],
        )
        rounds = self.compressor.average_(bucket, self._member, self._feedback)
        return self._executor.begin(rounds, label)

    @torch.no_grad()
    def finish(self, begun: Sequence[PendingAverage | None]) -> None:
        """Execute all requests that are left."""
        try:
            self._executor.finish(begun)
        except BaseException:
            self.compressor.rollback()
            raise

    def settle(self, averaged: Sequence[FlatGradients], *, skipped: bool) -> None:
        """A step that is skipped leaves the compressor's state as it was. So does one whose
        averages are not finite, on every rank alike: a gradient scaler skips it.
        """
        if skipped or not all(is_finite(gradients.flat) for gradients in averaged):
            self.compressor.rollback()
        else:
            self.compressor.commit()


# ------------------------------------------------------------------------------
# A compressor's requests, executed by a backend's collectives.


class PendingAverage(NamedTuple):
    """An average that is under way: its rounds, and the collective that the next one waits for.

    shape   of the tensor that the rounds go on with
    """

    rounds: Rounds
    pending: PendingCollective[Tensor]
    shape: torch.Size
    label: str


class RequestExecutor:
    """Executes the requests of compressors with the collectives of a backend.

    bytes_sent   bytes that this rank has sent so far, as rings and direct messages send them. For
                 p ranks: 2(p-1)/p of the bytes of an `AllReduceMean`, (p-1)/p of a
                 `ReduceScatterMean` or an `AllToAll`, p-1 times those of an `AllGather`
    """

    def __init__(self, backend: Backend) -> None:
        self.bytes_sent = 0
        self._backend = backend

    def begin(self, rounds: Rounds, label: str) -> PendingAverage | None:
        """Do the arithmetic before the first request and start that, in the background. None if
        there is no request.

        label   what it is, in errors: ranks whose labels differ do not mean the same
        """
        request = next(rounds, None)
        return None if request is None else self._start(rounds, request, label)

    def finish(self, averages: Sequence[PendingAverage | None]) -> None:
        """Execute all requests that are left: round after round, each of all averages, so that
        their messages overlap; in the same order on every rank. Blocks.
        """
        under_way = [average for average in averages if average is not None]
        while under_way:
            following = []
            for rounds, pending, shape, label in under_way:
                try:
                    request = rounds.send(pending.wait().view(shape))
                except StopIteration:
                    continue
                following.append(self._start(rounds, request, label))
            under_way = following

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
