"""Clocks: who has joined, how many steps each has done, and who may begin the next one.

A worker's clock counts its pushes, from where the slowest was when it joined:

    rank 1   0 - 1 - 2 - 3 - 4 - 5      with a bound of 2, rank 1 may not begin its next step:
    rank 2   0 - 1 - 2                  it is 5 - 2 = 3 ahead. Rank 3 came late, and began where
    rank 3           2 - 3 - 4          the slowest was
"""

from __future__ import annotations

from collections.abc import Iterable


class Clocks:
    """Those of all workers of one server.

    of       the clocks of the workers that have joined and not left
    coming   the workers that have not joined yet, and may
    """

    def __init__(self, workers: Iterable[int], bound: float, quorum: int) -> None:
        self.of: dict[int, int] = {}
        self.coming = set(workers)
        self._bound = bound
        self._quorum = quorum
        self._joined = 0
        self._latest_slowest = 0

    @property
    def slowest(self) -> int:
        """The clock of the slowest that has joined; if none is there, what it was last."""
        if self.of:
            self._latest_slowest = min(self.of.values())
        return self._latest_slowest

    @property
    def is_open(self) -> bool:
        """Whether as many have joined as steps wait for, or as many as can."""
        return self._joined >= min(self._quorum, self._joined + len(self.coming))

    def join(self, worker: int, clock: int) -> None:
        """A worker is there, and has done so many steps."""
        self.coming.remove(worker)
        self.of[worker] = clock
        self._joined += 1

    def leave(self, worker: int) -> None:
        """It is not waited for any more."""
        self._latest_slowest = self.slowest
        self.coming.discard(worker)
        self.of.pop(worker, None)

    def tick(self, worker: int) -> None:
        """It has done a step."""
        self.of[worker] += 1

    def may_begin(self, worker: int) -> bool:
        """Whether it is not too far ahead of the slowest to begin its next step."""
        return self.of[worker] - self.slowest <= self._bound
