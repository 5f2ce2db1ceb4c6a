"""The parameter server: one rank has the parameters and averages the gradients of all.

    rank 0   mean of all gradients            parameters
                ^      ^      ^              |     |     |
             reduce to rank 0              broadcast from rank 0
                |      |      |              v     v     v
             rank 0  rank 1  rank 2

(Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".)

`serve` and `connect` are the service: servers that do nothing else, and workers that push and pull
as they like. See `service/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from phalanx.aggregation.aggregators import (
    GradientAggregator,
    check_same_list,
    checked,
    cut_like,
    flattened,
    numbers_by_kind,
)
from phalanx.aggregation.parameter_server.client import ParameterClient
from phalanx.aggregation.parameter_server.server import serve
from phalanx.aggregation.parameter_server.state import ServerMode, ServiceRecord
from phalanx.aggregation.parameter_server.wire import OptimizerFactory
from phalanx.collectives import ReduceOp, broadcast_, reduce_
from phalanx.core.backend import Backend

SERVER = 0


class ParameterServer(GradientAggregator):
    """A synchronous server, rank 0, and workers, all ranks.

    timeout   seconds that a message waits at most; by default the backend's

    Every rank calls each method, in the same order, with lists alike: `DesyncError` on every rank
    names the first tensor that differs, before anything is summed. All tensors of a dtype go as one
    message.
    """

    backend: Backend

    def __init__(self, backend: Backend, *, timeout: float | None = None) -> None:
        self.backend = backend
        self.timeout = timeout

    def broadcast_params(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The server's parameters, new tensors on every rank. Blocks.

        params   of any shapes and dtypes, alike on every rank; only rank 0's values matter; not
                 changed
        """
        listed = self._checked(params, "broadcast_params")
        return self._together(listed, self._broadcast)

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean of each gradient over all ranks, computed by the server: new tensors, the same
        bits on every rank. Blocks.
        """
        listed = self._checked(gradients, "reduce_gradients")
        return self._together(listed, self._reduce)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """`reduce_gradients`."""
        return self.reduce_gradients(gradients)

    @staticmethod
    def serve(
        params: Sequence[Tensor],
        optimizer: OptimizerFactory,
        backend: Backend,
        *,
        servers: Sequence[int] = (0,),
        workers: Sequence[int] | None = None,
        mode: ServerMode = ServerMode.SYNCHRONOUS,
        quorum: int | None = None,
        timeout: float | None = None,
        on_step: Callable[[ServiceRecord], None] | None = None,
    ) -> ServiceRecord:
        """Be a server until every worker has closed its client, or is lost. Blocks until then.

        params      on every server, and worker, the same list, of floating or complex dtypes. Whole
                    tensors are shared out over the servers, balanced by bytes; each changes its own
                    in place, and leaves the others
        optimizer   `optimizer(params) -> torch.optim.Optimizer`: called once, with the tensors that
                    this server has, if it has any
        servers     ranks that serve; the same on every rank
        workers     ranks that may connect; by default all others. One may come when it likes, and
                    while it has not, nobody waits for it
        mode        `ServerMode.SYNCHRONOUS`: a step is the mean of the gradients of all that have
                    joined, summed in rank order. `ASYNCHRONOUS`: each push is a step, at once.
                    `staleness(s)`: the same, and nobody is more than s steps ahead of the slowest
        quorum      workers that must have joined before the first step, or all that are not lost;
                    by default all in synchronous mode, else 1
        timeout     seconds in which somebody must say something; by default the backend's. Longer
                    than a worker's step takes
        on_step     called after each step of the optimizer, with a record that is the same object
                    each time, and changes: to save `record.params` and
                    `record.optimizer.state_dict()`, for example, which `optimizer` may load when
                    the service is started anew. Nobody is served meanwhile

        Returns that record. Each worker's messages are in a group of their own, so whoever is lost
        breaks no other. Memory: besides the parameters and the optimizer's state, twice this
        server's parameters for each worker. Gradients are applied as they come, also if they are
        not finite.

        A worker that is lost, or whose list of parameters differs: in synchronous mode every worker
        and server gets a `PeerLostError` (`DesyncError` for the list) that names it and the step.
        Else it is dropped, with a warning in the log; what it has pushed whole was applied, half a
        push is not. (`phalanx run` and `spawn` end a job when a rank of it fails: where workers may
        die, start the ranks by other means, and so that the death of one does not end the others.)
        An exception of the optimizer or of `on_step` ends the service, and the workers
        are told. `CollectiveTimeoutError` names who has not come, and whom it waits for.
        TypeError, ValueError, `InvalidRankError`, `UnsupportedOperationError` and `MisuseError` for
        arguments, before anything is sent. A rank serves once at a time; the n-th `serve` meets
        each worker's n-th `connect`.
        """
        return serve(
            params,
            optimizer,
            backend,
            servers=servers,
            workers=workers,
            mode=mode,
            quorum=quorum,
            timeout=timeout,
            on_step=on_step,
        )

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

        It begins at the step where the slowest that has joined is. 96 bytes each way, for each
        server. `DesyncError` on both sides, naming the first parameter that differs, if the lists
        do; `PeerLostError` and `CollectiveTimeoutError`, after which it cannot be repeated.
        """
        return ParameterClient(params, backend, servers=servers, timeout=timeout)

    def _checked(self, tensors: Sequence[Tensor], method: str) -> list[Tensor]:
        listed = checked(tensors, "ParameterServer", self.backend)
        who = f"ParameterServer.{method}"
        check_same_list(listed, self.backend, who, timeout=self.timeout)
        return listed

    def _broadcast(self, flat: Tensor) -> None:
        broadcast_(flat, self.backend, SERVER, timeout=self.timeout)

    def _reduce(self, flat: Tensor) -> None:
        reduce_(flat, self.backend, SERVER, ReduceOp.MEAN, timeout=self.timeout)
        self._broadcast(flat)

    @staticmethod
    def _together(tensors: list[Tensor], do_: Callable[[Tensor], None]) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for numbers in numbers_by_kind(tensors):
            same = [tensors[number] for number in numbers]
            flat = flattened(same)
            do_(flat)
            results.update(zip(numbers, cut_like(flat, same), strict=True))
        return [results[number] for number in range(len(tensors))]
