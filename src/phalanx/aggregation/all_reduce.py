"""The average by all-reduce: every rank does the same."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.aggregation.aggregator import GradientAggregator, checked
from phalanx.aggregation.agreement import check_same_list
from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp, all_reduce_coalesced


class AllReduceAggregator(GradientAggregator):
    """The mean over the ranks of a backend, all gradients of a dtype in one message.

    reproducible   sum in rank order: the same bits on every backend and for every list
    timeout        seconds that a message waits at most; by default the backend's

    A ring sends 2(p-1)/p of the gradients' bytes from each of p ranks, and 16 bytes to compare the
    lists. Raises `DesyncError` on every rank, naming the first gradient that differs, before
    anything is summed; and what `all_reduce_coalesced` raises.
    """

    backend: Backend

    def __init__(
        self, backend: Backend, *, reproducible: bool = False, timeout: float | None = None
    ) -> None:
        self.backend = backend
        self.reproducible = reproducible
        self.timeout = timeout

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The means, new tensors."""
        listed = checked(gradients, "AllReduceAggregator", self.backend)
        check_same_list(listed, self.backend, "AllReduceAggregator", timeout=self.timeout)
        return all_reduce_coalesced(
            [gradient.detach() for gradient in listed],
            self.backend,
            ReduceOp.MEAN,
            reproducible=self.reproducible,
            timeout=self.timeout,
        )
