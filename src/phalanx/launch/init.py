"""`init`: this process's place in its job, as a backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.launch.environment import read_environment
from phalanx.launch.factories import MEET_BY_THEMSELVES, MeetingPoint, factory_named
from phalanx.launch.meeting import find_meeting_point

if TYPE_CHECKING:
    from phalanx.backends.base import Backend

__all__ = ["init"]


def init(backend: str = "auto", *, timeout: float = 60.0) -> Backend:
    """Return the backend of this rank in the job that a launcher started.

    Reads what `phalanx run`, `torchrun`, `mpirun` or `srun` left in the environment; without a
    launcher it is a world of one, so that a script runs unchanged by hand. `timeout` (seconds)
    bounds the wait for the other ranks here, and is the default of every later call.

    `backend` is "tcp"; "shm", shared memory, for ranks on one host; "hybrid", shared memory inside
    a host and TCP between; "mpi", under `mpirun`; "gloo", "nccl" or "ucc", torch's; or "auto",
    which is shm on one host and hybrid on several, and falls back to TCP where memory cannot be
    shared. Another name raises `BackendUnavailableError`, as does a store of the launcher that
    cannot be reached. An environment that makes no sense raises what `read_environment` says.
    """
    factory = factory_named(backend)
    world = read_environment(os.environ)
    if world is None:
        return factory(MeetingPoint(rank=0, world_size=1), timeout)
    if backend in MEET_BY_THEMSELVES:
        return factory(MeetingPoint(world.rank, world.world_size), timeout)
    return factory(find_meeting_point(world, timeout=timeout), timeout)
