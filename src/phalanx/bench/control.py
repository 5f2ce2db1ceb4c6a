"""What the ranks of a benchmark tell each other between rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.collectives import all_gather_object, barrier, broadcast_object

if TYPE_CHECKING:
    from phalanx.backends.base import Backend

__all__ = ["Control"]


class Control:
    """A backend over TCP of its own, which is idle while anything is timed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rank = backend.rank
        self.size = backend.world_size
        self.topology = backend.topology

    def barrier(self) -> None:
        """Wait until every rank is here."""
        barrier(self._backend)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return all_gather_object(value, self._backend)

    def slowest(self, seconds: list[float]) -> list[float]:
        """For each place of the list, the largest that a rank has."""
        return [max(values) for values in zip(*self.gather(seconds), strict=True)]

    def from_root(self, value: Any) -> Any:
        """Rank 0's value."""
        return broadcast_object(value if self.rank == 0 else None, self._backend)

    def problem(self, here: str) -> str:
        """The first rank's problem, on every rank; empty where no rank has one."""
        found = [
            f"rank {rank}: {text}" if len(set(texts)) > 1 else text
            for texts in [self.gather(here)]
            for rank, text in enumerate(texts)
            if text
        ]
        return found[0] if found else ""

    def close(self) -> None:
        """Leave."""
        self._backend.close()
