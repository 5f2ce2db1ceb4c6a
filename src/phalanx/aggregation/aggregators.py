"""`GradientAggregator`: gradients in, their average out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from math import nan
from typing import Any, TypeAlias

import torch
from torch import Tensor

from phalanx.aggregation.parameter_server.client import ParameterClient
from phalanx.aggregation.parameter_server.server import OnStep, OptimizerFactory, Server
from phalanx.aggregation.parameter_server.state import ServerMode, ServiceRecord
from phalanx.aggregation.parameter_server.wire import described
from phalanx.collectives import ReduceOp, all_gather, all_reduce_coalesced, broadcast_, reduce_
from phalanx.collectives.check_same import difference
from phalanx.collectives.request import check_backend
from phalanx.compression import Compressor
from phalanx.compression.compressor import (
    GradientBucket,
    Member,
    check_compressor,
    check_floating,
    is_finite,
    listed_tensors,
)
from phalanx.compression.error_feedback import RESIDUAL
from phalanx.core.backend import Backend
from phalanx.errors import DesyncError, SizeMismatchError, UnsupportedOperationError
from phalanx.parallel.averaging import RequestExecutor, weigh_
from phalanx.parallel.compressor_state import load_own, own_state
from phalanx.parallel.joined_step import checked_weight, sum_of_weights

Weight: TypeAlias = float | Tensor | None
Buckets: TypeAlias = list[GradientBucket]


class GradientAggregator(ABC):
    """Averages gradients over ranks. Another aggregator needs one method, `aggregate`.

    backend   the ranks; None if there is one only
    steps     number of its training steps (`distributed_train_step` counts them)
    """

    backend: Backend | None = None
    steps: int = 0

    @abstractmethod
    def aggregate(self, gradients: Sequence[Tensor], *, weight: Weight = None) -> list[Tensor]:
        """Return the average of each of some gradients over all ranks.

        gradients   any number, shapes and dtypes, alike on every rank in one order; not changed
        weight      of this rank: the number of samples, or tokens, in the sum of whose losses these
                    are the gradients. The average is then (sum of gradients) / (sum of weights),
                    that of the joined batch. With 0 they count as zeros, even if they are NaN

        Blocks until this rank has them: new tensors of the same shapes and dtypes, the same bits on
        every rank. With `weight` a message of 8 bytes more; ValueError, on every rank, before
        gradients are sent, if one is negative or not finite, or all are 0.
        """


class LocalAggregator(GradientAggregator):
    """The aggregator of one rank: the average is the gradient."""

    def aggregate(self, gradients: Sequence[Tensor], *, weight: Weight = None) -> list[Tensor]:
        """Return copies of the gradients, since every aggregator returns new tensors."""
        who = "LocalAggregator.aggregate"
        weights = [1.0 if weight is None else checked_weight(weight, who)]
        factor = 1 / sum_of_weights(weights, 0, who)
        return [weigh_(each.detach().clone(), factor) for each in listed_tensors(gradients, who)]


def checked(gradients: Iterable[Tensor], who: str, backend: Backend) -> list[Tensor]:
    """Return the gradients as a list. TypeError if it is no list of tensors,
    `UnsupportedOperationError` if one is not dense.
    """
    where = f"rank {backend.rank}: {who}.aggregate"
    listed = listed_tensors(gradients, where)
    for number, gradient in enumerate(listed):
        if gradient.layout is not torch.strided or gradient.is_nested:
            raise UnsupportedOperationError(
                f"{where}: gradient {number} is {gradient.layout}; only dense gradients are "
                "averaged: pass sparse=False to the embedding, or give gradient.to_dense()",
                rank=backend.rank,
                op="aggregate",
            )
    return listed


# ------------------------------------------------------------------------------
# The average by all-reduce: every rank does the same.


class AllReduceAggregator(GradientAggregator):
    """The mean over the ranks of a backend, all gradients of a dtype in one message.

    reproducible   sum in rank order: the same bits on every backend and for every list
    timeout        seconds that a message waits at most; by default the backend's

    A ring sends 2(p-1)/p of the gradients' bytes from each of p ranks, and 8 bytes to compare the
    lists. Raises `DesyncError` on every rank, naming the first gradient that differs, before
    anything is summed, and the errors of `all_reduce_coalesced`.
    """

    backend: Backend

    def __init__(
        self, backend: Backend, *, reproducible: bool = False, timeout: float | None = None
    ) -> None:
        self.backend = backend
        self.reproducible = reproducible
        self.timeout = timeout

    def aggregate(self, gradients: Sequence[Tensor], *, weight: Weight = None) -> list[Tensor]:
        listed = checked(gradients, "AllReduceAggregator", self.backend)
        return all_reduce_coalesced(
            alike(listed, self.backend, "AllReduceAggregator", weight, self.timeout),
            self.backend,
            ReduceOp.MEAN,
            reproducible=self.reproducible,
            timeout=self.timeout,
        )


# ------------------------------------------------------------------------------
# The average of compressed gradients.


class CompressedAggregator(GradientAggregator):
    """The mean over the ranks of a backend, from compressed messages.

    compressor   `ErrorFeedback(TopK(0.01))`, `PowerSGD(4)`, ...; `.compressor` is a copy of it

    All gradients of a dtype are compressed together (top-k takes the largest of all of them);
    matrices keep their shapes. The compressor knows a gradient by its number in the list: always
    give the gradients of the same parameters (under error feedback, `SizeMismatchError` on every
    rank for another shape than before). Raises `DesyncError` on every rank, naming the first
    gradient that differs, before anything is summed; `UnsupportedOperationError`, before anything
    is sent, for dtypes that cannot be compressed.

    If averages are not finite they are returned so, and the compressor's state stays as it was:
    skip such a step. The state also stays if a call fails.
    """

    backend: Backend

    def __init__(self, backend: Backend, compressor: Compressor) -> None:
        check_compressor(compressor, "CompressedAggregator")
        self.backend = backend
        self.compressor = deepcopy(compressor)
        self._exchange = RequestExecutor(backend)
        self._shapes: dict[int, torch.Size] = {}  # of gradients that may have a residual

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far, by rings and direct messages."""
        return self._exchange.bytes_sent

    @torch.no_grad()
    def aggregate(self, gradients: Sequence[Tensor], *, weight: Weight = None) -> list[Tensor]:
        rank, listed = self.backend.rank, checked(gradients, "CompressedAggregator", self.backend)
        for number, gradient in enumerate(listed):
            check_floating(gradient, f"rank {rank}: gradient {number}: {self.compressor}")
        who = f"CompressedAggregator({self.compressor!r})"
        listed = alike(listed, self.backend, who, weight, None)
        for number, gradient in enumerate(listed):  # or residuals of others would be added to them
            before = self._shapes.get(number, gradient.shape)
            if before != gradient.shape:
                raise SizeMismatchError(
                    f"rank {rank}: {self.compressor}: gradient {number} has the shape "
                    f"{list(gradient.shape)}, and what is left over is of one of {list(before)}: "
                    "give the gradients of the same parameters in the same order in every call, or "
                    "make a new aggregator for others",
                    rank=rank,
                    op="aggregate",
                )
        buckets = bucketed(listed)
        member = Member(rank, self.backend.world_size)
        try:
            under_way = [
                self._exchange.begin(self.compressor.average_(bucket, member), who)
                for bucket in buckets
            ]
            self._exchange.finish(under_way)
        except BaseException:
            self.compressor.rollback()
            raise
        if all(is_finite(bucket.flat) for bucket in buckets):
            self.compressor.commit()
            if RESIDUAL in self.compressor.remembers():
                self._shapes.update(enumerate(gradient.shape for gradient in listed))
        else:
            self.compressor.rollback()
        return unbucketed(buckets)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the compressor's state on this rank, under keys that name the rank:
        `compression@<rank>/<ranks>.<key>`. The states of all ranks may be joined into one dict.
        """
        return own_state(self.compressor, self.backend)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from states that were saved by any number of ranks, joined into one dict.

        For as many ranks as before, each needs only its own state; else all are needed. A warning
        in the log names the missing ones, whose residuals are lost. Nothing is sent.
        """
        load_own(self.compressor, state, self.backend)
        self._shapes.clear()


# ------------------------------------------------------------------------------
# Comparison of the ranks' lists of gradients.


def alike(
    gradients: Sequence[Tensor], backend: Backend, who: str, weight: Weight, timeout: float | None
) -> list[Tensor]:
    """Return the gradients, weighted if there is a weight: their mean over the ranks is the result.

    Raise `DesyncError` on every rank, naming the first gradient that differs, unless all have as
    many, of the same shapes and dtypes. Blocks for a message of 8 bytes, and one for weights,
    before any sum, each for at most `timeout` seconds, by default the backend's.
    """
    mine = [f"gradient {number} ({described(each)})" for number, each in enumerate(gradients)]
    called = f"called {who}" if weight is None else f"called {who} with a weight"
    differ = difference([called, *mine], backend, end="no more gradients", timeout=timeout)
    if differ is None:
        factor = 1.0 if weight is None else _factor(weight, backend, who, timeout)
        detached = [gradient.detach() for gradient in gradients]
        return detached if factor == 1 else [weigh_(each.clone(), factor) for each in detached]
    if differ.place == 0:
        problem = f"the ranks do different things: {differ.text}"
    else:
        problem = (
            f"the ranks' lists of gradients differ: {differ.text}. Give the gradients of the same "
            "parameters on every rank, in the same order, and zeros for one that a rank does not "
            "have"
        )
    raise DesyncError(
        f"rank {backend.rank}: {who}: {problem}",
        rank=backend.rank,
        peer=differ.odd[0],
        op="aggregate",
    )


def _factor(weight: float | Tensor, backend: Backend, who: str, timeout: float | None) -> float:
    """Return p / (sum of weights), or 0 for a weight of 0. One message of 8 bytes."""
    problem: Exception | None = None
    try:
        mine = checked_weight(weight, f"rank {backend.rank}: {who}")
    except (TypeError, ValueError) as error:
        mine, problem = nan, error
    weights = all_gather(torch.tensor([mine], dtype=torch.float64), backend, timeout=timeout)
    if problem is not None:
        raise problem
    total = sum_of_weights(weights.tolist(), backend.rank, who)
    return backend.world_size / total if mine else 0.0


# ------------------------------------------------------------------------------
# Lists of tensors as buckets, and back.


def bucketed(tensors: Sequence[Tensor]) -> list[GradientBucket]:
    """Copy tensors, named by their numbers, into a bucket for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    return [
        GradientBucket.of([tensors[number] for number in numbers], [*map(str, numbers)])
        for numbers in kinds.values()
    ]


def unbucketed(buckets: Iterable[GradientBucket]) -> list[Tensor]:
    """Return new tensors with the values in the buckets, in the order of the given list."""
    found = {
        int(place.name): values.clone()
        for bucket in buckets
        for place, values in bucket.cut(bucket.flat)
    }
    return [found[number] for number in sorted(found)]


# ------------------------------------------------------------------------------
# The parameter server: one rank has the parameters and averages the gradients of all.
#
#     rank 0   mean of all gradients            parameters
#                 ^      ^      ^              |     |     |
#              reduce to rank 0              broadcast from rank 0
#                 |      |      |              v     v     v
#              rank 0  rank 1  rank 2
#
# (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".)
#
# `serve` and `connect` are the service: servers that do nothing else, and workers that push and
# pull at any time. See `parameter_server/`.

SERVER = 0


class ParameterServer(GradientAggregator):
    """A synchronous server, rank 0, and workers, all ranks.

    timeout   seconds that a message waits at most; by default the backend's

    A star: a worker sends its gradients' bytes once, to the server alone, and receives as many from
    it; the server moves p-1 times that. Not so if ranks share memory, or a library does the
    collectives. Ranks compare a hash of their lists, 8 bytes, and exchange these if they differ.

    Every rank calls each method, in the same order, with lists alike: `DesyncError` on every rank
    names the first tensor that differs, before any sum. All tensors of a dtype are one message.
    Means that are not finite are returned so, on every rank alike: look before a step with them.
    """

    backend: Backend

    def __init__(self, backend: Backend, *, timeout: float | None = None) -> None:
        self.backend = backend
        by_messages = not backend.shares_memory and backend.native is None
        algorithm = "star" if by_messages else "auto"
        self._options: dict[str, Any] = {"algorithm": algorithm, "timeout": timeout}

    def broadcast_params(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the server's parameters, new tensors on every rank. Blocks.

        params   any shapes and dtypes, alike on every rank; rank 0's values count; not changed
        """
        buckets = self._bucketed(params, "broadcast_params", None)
        for bucket in buckets:
            broadcast_(bucket.flat, self.backend, SERVER, **self._options)
        return unbucketed(buckets)

    def reduce_gradients(self, gradients: Sequence[Tensor], weight: Weight = None) -> list[Tensor]:
        """Return the server's means over all ranks: new tensors, the same bits on each. Blocks."""
        buckets = self._bucketed(gradients, "reduce_gradients", weight)
        for bucket in buckets:
            reduce_(bucket.flat, self.backend, SERVER, ReduceOp.MEAN, **self._options)
            broadcast_(bucket.flat, self.backend, SERVER, **self._options)
        return unbucketed(buckets)

    def aggregate(self, gradients: Sequence[Tensor], *, weight: Weight = None) -> list[Tensor]:
        return self.reduce_gradients(gradients, weight)

    def _bucketed(self, tensors: Sequence[Tensor], method: str, weight: Weight) -> Buckets:
        listed = checked(tensors, "ParameterServer", self.backend)
        who, timeout = f"ParameterServer.{method}", self._options["timeout"]
        return bucketed(alike(listed, self.backend, who, weight, timeout))

    @staticmethod
    def serve(
        params: Sequence[Tensor],
        backend: Backend,
        optimizer: OptimizerFactory,
        *,
        servers: Sequence[int] = (0,),
        workers: Sequence[int] | None = None,
        mode: ServerMode = ServerMode.SYNCHRONOUS,
        quorum: int | None = None,
        timeout: float | None = None,
        on_step: OnStep | None = None,
    ) -> ServiceRecord:
        """Be a server until every worker has closed its client, or is lost. Blocks until then.

        params      on every server, and worker, the same list, of floating or complex dtypes. Whole
                    tensors are shared out over the servers, balanced by bytes; each changes its own
                    in place, and leaves the others
        optimizer   `optimizer(params) -> torch.optim.Optimizer`: called once, with the tensors that
                    this server has, if it has any
        servers     ranks that serve; the same on every rank
        workers     ranks that may connect; by default all others. A worker may come at any time,
                    and nobody waits for it before
        mode        `ServerMode.SYNCHRONOUS`: a step is the mean of the gradients of all that have
                    joined, summed in rank order. `ASYNCHRONOUS`: each push is a step, at once.
                    `staleness(s)`: the same, and nobody is more than s steps ahead of the slowest
        quorum      workers that must have joined before the first step, or all that are not lost;
                    by default all in synchronous mode, else 1
        timeout     seconds without any message; by default the backend's. Has to be longer
                    than a worker's step takes
        on_step     called after each step of the optimizer, with the same record each time, which
                    changes: to save `record.params` and `record.optimizer.state_dict()`, which
                    `optimizer` may load in a new service. No worker is served meanwhile

        Returns that record. Each worker has a group of its own, so a lost worker breaks no other.
        Memory: the parameters, the optimizer's state, and twice this server's parameters for each
        worker. A worker refuses to push a gradient that is not finite.

        A worker fails if it is lost, sends a message that no client sends, or has another list of
        parameters. In synchronous mode every worker and server then gets a `PeerLostError`
        (`DesyncError` for the list) that names it and the step. Else it is dropped, with a warning
        in the log; its complete pushes were applied, half a push is not. (`phalanx run` and `spawn`
        end a job when a rank of it fails: if workers may die, start the ranks so that the death of
        one does not end the others.) An exception of the optimizer or of `on_step` ends the
        service, and the workers are told. `CollectiveTimeoutError` names the absent ranks, and the
        ranks it waits for. TypeError, ValueError, `InvalidRankError`, `UnsupportedOperationError`
        and `MisuseError` for arguments, before anything is sent. A rank serves once at a time; its
        n-th `serve` goes with each worker's n-th `connect`.
        """
        check_backend(backend, "ParameterServer.serve(params, backend, optimizer)", optimizer)
        return Server(
            params, optimizer, backend, servers, workers, mode, quorum, timeout, on_step
        ).run()

    @staticmethod
    def connect(
        params: Sequence[Tensor],
        backend: Backend,
        *,
        servers: Sequence[int] = (0,),
        timeout: float | None = None,
    ) -> ParameterClient:
        """Be a worker of the ranks that `serve`. Blocks until all of these do.

        params    as on the servers; their values do not matter, and are not changed before the
                  first `pull_` or `step`
        timeout   seconds that a call waits at most; by default the backend's

        It begins at the step of the slowest worker that has joined. 96 bytes each way, for each
        server. `DesyncError` on both sides, naming the first parameter that differs, if the lists
        do; `PeerLostError` and `CollectiveTimeoutError`, after which it cannot be repeated.
        """
        return ParameterClient(params, backend, servers=servers, timeout=timeout)
