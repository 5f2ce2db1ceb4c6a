"""Requests of a compressor, carried out by a backend's collectives.

begin   one request, in the background: for who has something else to do meanwhile
finish  all requests of some averages, whose first ones have begun: round after round, each of
        all averages, so that their messages overlap, and in the same order on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives import PendingCollective, ReduceOp
from phalanx.collectives.run import start
from phalanx.collectives.task import Task, in_place, memory_for
from phalanx.compression.exchange import Gather, Mean, Request, Rounds


class Under(NamedTuple):
    """An average that is under way: its rounds, and the collective that it waits for."""

    rounds: Rounds
    pending: PendingCollective[Tensor]
    label: str


def begin(rounds: Rounds, backend: Backend, label: str) -> Under | None:
    """Do the arithmetic before the first request and begin that; None if there is none.

    label   what it is, in errors: ranks whose labels differ do not mean the same
    """
    request = next(rounds, None)
    return None if request is None else Under(rounds, _begin(request, backend, label), label)


def finish(averages: Sequence[Under | None], backend: Backend) -> None:
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
            following.append(Under(rounds, _begin(request, backend, label), label))
        under_way = following


def _begin(request: Request, backend: Backend, label: str) -> PendingCollective[Tensor]:
    task = _task(request, backend)
    return start(task, backend, background=True, label=label)


def _task(request: Request, backend: Backend) -> Task[Tensor]:
    given = request.tensor.contiguous()
    if isinstance(request, Mean):
        return in_place("all_reduce", given, op=ReduceOp.MEAN)
    rows = (backend.world_size, *given.shape) if isinstance(request, Gather) else tuple(given.shape)
    name = "all_gather" if isinstance(request, Gather) else "all_to_all"
    result = memory_for(backend, rows, given.dtype, given.device)
    return Task(name, rows, given.dtype, given, result, lambda: result)
