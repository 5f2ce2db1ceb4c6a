"""Requests of a compressor, carried out by a backend's collectives.

begin   one request, in the background: for who has something else to do meanwhile
finish  all requests of some averages, whose first ones have begun: round after round, each of
        all averages, so that their messages overlap, and in the same order on every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives import PendingCollective, ReduceOp
from phalanx.collectives.run import start
from phalanx.collectives.task import Task, in_place, memory_for
from phalanx.compression.exchange import Gather, Mean, MeanShard, Request, Rounds, Swap


class Under(NamedTuple):
    """An average that is under way: its rounds, and the collective that it waits for."""

    rounds: Rounds
    pending: PendingCollective[Tensor]
    label: str


class Exchange:
    """Carries out requests over the ranks of a backend.

    bytes_sent   by this rank so far, as rings and direct messages send them: of each mean 2(p-1)/p
                 of its bytes, of what is gathered p-1 times, of what is swapped, or of whose mean
                 each gets a shard, (p-1)/p
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
    if isinstance(request, Mean):
        return in_place("all_reduce", given, op=ReduceOp.MEAN)
    shape = tuple(given.shape)
    if isinstance(request, MeanShard):
        mean = memory_for(backend, shape[1:], given.dtype, given.device)
        return Task(
            *("reduce_scatter", shape, given.dtype, given, mean, lambda: mean),
            op=ReduceOp.MEAN,
            consumes=True,
        )
    rows = (backend.world_size, *shape) if isinstance(request, Gather) else shape
    name = "all_gather" if isinstance(request, Gather) else "all_to_all"
    result = memory_for(backend, rows, given.dtype, given.device)
    return Task(name, rows, given.dtype, given, result, lambda: result)


_SENT: Mapping[type, tuple[int, bool]] = MappingProxyType(
    {Mean: (2, True), MeanShard: (1, True), Gather: (1, False), Swap: (1, True)}
)
"""How often, and whether a p-th of it."""
