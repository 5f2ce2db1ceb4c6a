"""How buckets are averaged: by all-reduce, or compressed.

begin    a bucket is full: do what can be done while backward goes on
finish   the pass is over: wait for all that has begun; buckets hold averages then
settle   it is known whether the step counts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from phalanx.collectives import PendingCollective, ReduceOp
from phalanx.collectives.request import Task, in_place, memory_for
from phalanx.collectives.resolve import start
from phalanx.compression import Compressor
from phalanx.compression.compressor import (
    NO_RESIDUALS,
    AllGather,
    AllReduceMean,
    AllToAll,
    GradientBucket,
    Member,
    ReduceScatterMean,
    Request,
    ResidualStore,
    Rounds,
    is_finite,
)
from phalanx.core.backend import Backend


class Gradients(Protocol):
    """Of some parameters, flat: what is averaged together."""

    parameters: list[nn.Parameter]
    flat: Tensor


class Averaging(Protocol):
    """Averages gradients over the ranks, in place."""

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""

    def begin(self, gradients: Gradients, label: str) -> Any:
        """Begin to average with those of that label on the other ranks; a handle for `finish`."""

    def finish(self, begun: Sequence[Any]) -> None:
        """Wait for all of them. Raises the first error, after all ended."""

    def settle(self, averaged: Sequence[Gradients], *, skipped: bool) -> None:
        """The pass is over: these are its averages, and its step counts unless it is skipped."""


class AllReduced:
    """By one all-reduce each, in the background."""

    def __init__(self, backend: Backend) -> None:
        self.bytes_sent = 0
        self._backend = backend

    def begin(self, gradients: Gradients, label: str) -> PendingCollective[Tensor]:
        """Start the all-reduce."""
        self.bytes_sent += bytes_of(AllReduceMean(gradients.flat), self._backend.world_size)
        return start(
            in_place("all_reduce", gradients.flat, op=ReduceOp.MEAN),
            self._backend,
            background=self._backend.spares_a_processor,
            label=label,
        )

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

    def settle(self, averaged: Sequence[Gradients], *, skipped: bool) -> None:
        """Nothing is remembered."""


class Compressed:
    """By a compressor, which knows each gradient by its parameter's name.

    What it computes before its first message it does when the bucket is full, inside of backward;
    the rest at the end, all buckets' messages of a round together.

    feedback   keeps what the compressor leaves out, unless that is an `ErrorFeedback`
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
        self._exchange = Exchange(backend)
        self._member = Member(backend.rank, backend.world_size)

    @property
    def bytes_sent(self) -> int:
        """By this rank so far."""
        return self._exchange.bytes_sent

    @torch.no_grad()
    def begin(self, gradients: Gradients, label: str) -> Any:
        """Compress, and start the first exchange."""
        bucket = GradientBucket(
            gradients.flat,
            [self._names[parameter] for parameter in gradients.parameters],
            [parameter.shape for parameter in gradients.parameters],
        )
        rounds = self.compressor.average_(bucket, self._member, self._feedback)
        return self._exchange.begin(rounds, label)

    @torch.no_grad()
    def finish(self, begun: Sequence[Any]) -> None:
        """Carry out all that is left."""
        try:
            self._exchange.finish(begun)
        except BaseException:
            self.compressor.rollback()
            raise

    def settle(self, averaged: Sequence[Gradients], *, skipped: bool) -> None:
        """A step that is skipped leaves the compressor's state as it was. So does one whose
        averages are not finite, on every rank alike: a gradient scaler skips it.
        """
        if skipped or not all(is_finite(gradients.flat) for gradients in averaged):
            self.compressor.rollback()
        else:
            self.compressor.commit()


# ------------------------------------------------------------------------------
# Requests of a compressor, carried out by a backend's collectives.
#
# begin   one request, in the background: for who has something else to do meanwhile
# finish  all requests of some averages, whose first ones have begun: round after round, each of
#         all averages, so that their messages overlap, and in the same order on every rank


class Under(NamedTuple):
    """An average that is under way: its rounds, and the collective that it waits for."""

    rounds: Rounds
    pending: PendingCollective[Tensor]
    label: str


class Exchange:
    """Carries out requests over the ranks of a backend.

    bytes_sent   by this rank so far, as rings and direct messages send them: of each mean 2(p-1)/p
                 of its bytes, of what is gathered p-1 times, of what goes all to all, or of whose
                 mean each gets a shard, (p-1)/p
    """

    def __init__(self, backend: Backend) -> None:
        self.bytes_sent = 0
        self._backend = backend

    def begin(self, rounds: Rounds, label: str) -> Under | None:
        """Do the arithmetic before the first request and begin that; None if there is none.

        label   what it is, in errors: ranks whose labels differ do not mean the same
        """
        request = next(rounds, None)
        return None if request is None else self._begun(rounds, request, label)

    def finish(self, averages: Sequence[Under | None]) -> None:
        """Wait for all of them, and do what comes next."""
        under_way = [average for average in averages if average is not None]
        while under_way:
            following = []
            for rounds, pending, label in under_way:
                result = pending.wait()
                try:
                    request = rounds.send(result)
                except StopIteration:
                    continue
                following.append(self._begun(rounds, request, label))
            under_way = following

    def _begun(self, rounds: Rounds, request: Request, label: str) -> Under:
        self.bytes_sent += bytes_of(request, self._backend.world_size)
        pending = start(_task(request, self._backend), self._backend, background=True, label=label)
        return Under(rounds, pending, label)


def bytes_of(request: Request, ranks: int) -> int:
    """What each rank sends for it."""
    twice, of = _SENT[type(request)]
    share = (ranks - 1) * twice * request.tensor.nbytes
    return share // ranks if of else share


def _task(request: Request, backend: Backend) -> Task[Tensor]:
    given = request.tensor.contiguous()
    if isinstance(request, AllReduceMean):
        return in_place("all_reduce", given, op=ReduceOp.MEAN)
    shape = tuple(given.shape)
    if isinstance(request, ReduceScatterMean):
        mean = memory_for(backend, shape[1:], given.dtype, given.device)
        return Task(
            *("reduce_scatter", shape, given.dtype, given, mean, lambda: mean),
            op=ReduceOp.MEAN,
            consumes=True,
        )
    rows = (backend.world_size, *shape) if isinstance(request, AllGather) else shape
    name = "all_gather" if isinstance(request, AllGather) else "all_to_all"
    result = memory_for(backend, rows, given.dtype, given.device)
    return Task(name, rows, given.dtype, given, result, lambda: result)


_SENT: Mapping[type, tuple[int, bool]] = MappingProxyType(
    {
        AllReduceMean: (2, True),
        ReduceScatterMean: (1, True),
        AllGather: (1, False),
        AllToAll: (1, True),
    }
)
"""How often, and whether a p-th of it."""
