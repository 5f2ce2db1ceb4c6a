"""How FSDP starts a collective."""

from __future__ import annotations

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives import PendingCollective
from phalanx.collectives.run import start
from phalanx.collectives.task import Task

_MOVED = ("all_gather", "reduce_scatter")


def begin(task: Task[Tensor], backend: Backend, label: str) -> PendingCollective[Tensor]:
    """Start it; it moves on while this rank computes.

    Where memory is shared there is nothing to move meanwhile: who waits does all, and by then the
    others have come. By messages every rank sends each part once to each other one, which is the
    least there is, in bytes and in memory; not so where several ranks are on each of several hosts,
    or a library has collectives of its own, which know better.
    """
    hosts = len(set(backend.topology))
    plain = backend.native is None and hosts in (1, backend.world_size)
    least = plain and not backend.shares_memory and task.collective in _MOVED
    return start(
        task,
        backend,
        algorithm="direct" if least else "auto",
        background=not backend.shares_memory,
        label=label,
    )
