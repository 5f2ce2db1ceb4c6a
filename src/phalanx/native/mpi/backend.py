"""`MpiBackend`: ranks that MPI has started."""

from __future__ import annotations

from typing import Any

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.call import check_timeout
from phalanx.native.backend import WHERE_BYTES, LibraryBackend, Where, open_mesh
from phalanx.native.mpi.library import MpiLibrary, duplicate, looks_at_once
from phalanx.native.mpi.steps import import_mpi


class MpiBackend(LibraryBackend):
    """One rank of an MPI communicator, with MPI's own collectives. CPU memory only.

    comm      an intra-communicator of mpi4py: each of its ranks makes a backend. None: all ranks
              that `mpirun` has started; a process that it has not is a world of one
    timeout   seconds that a call waits at most, the rendezvous of the ranks included

    It works on a duplicate of `comm`, so that nothing mixes with what else is sent there, which is
    kept until MPI ends, after `close()` too: what comes late to one that was freed could be taken
    for another's. MPI does collectives; all else goes over a mesh as that of `HybridBackend`, which
    the ranks form by way of MPI, so they have to be able to connect to each other over TCP. MPI has
    no deadline: a collective that times out breaks its group, and the memory that it was given is
    kept until MPI ends. When a rank dies, `mpirun` ends the whole job, this rank included; an
    exception ends one rank only, and the others wait for it until their timeout, unless the script
    is started with `python -m mpi4py`, which then ends the job.

    Raises `BackendUnavailableError` without mpi4py or an MPI library, and if MPI was started for
    fewer threads than `MPI.THREAD_MULTIPLE`, and if the ranks cannot connect, which names the
    hosts; `CollectiveTimeoutError` if ranks do not come.
    """

    def __init__(self, comm: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        check_timeout(timeout)
        mpi = import_mpi()
        given = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(given, mpi.Intracomm):
            raise TypeError(f"comm must be an intra-communicator of mpi4py, not {given!r}")
        own = duplicate(given, timeout)
        where = where_over(mpi, own)

        def join(topology: tuple[int, ...]) -> MpiLibrary:
            return MpiLibrary(mpi, own, looks_at_once(topology.count(topology[own.Get_rank()])))

        super().__init__(
            *(own.Get_rank(), own.Get_size(), where, join),
            name="MPI",
            timeout=timeout,
            all_came=True,
        )


def where_over(mpi: Any, comm: Any) -> Where:
    """Where the mesh is, told by rank 0. All ranks are there, and call this."""
    host = comm.Split_type(mpi.COMM_TYPE_SHARED)
    alone = host.Get_size() == comm.Get_size()
    host.Free()
    where = open_mesh("127.0.0.1" if alone else None) if comm.Get_rank() == 0 else None
    told = bytearray(where.encode() if where is not None else WHERE_BYTES)
    comm.Bcast([told, len(told), mpi.BYTE], 0)
    return where or Where.decode(bytes(told))
