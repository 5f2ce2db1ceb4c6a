"""The parameter server: one rank has the parameters and averages the gradients of all.

    rank 0   mean of all gradients            parameters
                ^      ^      ^              |     |     |
             reduce to rank 0              broadcast from rank 0
                |      |      |              v     v     v
             rank 0  rank 1  rank 2

(Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from phalanx.aggregation.aggregator import GradientAggregator, checked
from phalanx.aggregation.agreement import check_same_list
from phalanx.aggregation.flat import cut_like, flattened, numbers_by_kind
from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp, broadcast_, reduce_

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
