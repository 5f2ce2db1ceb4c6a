"""`MpiBackend`: ranks that MPI has started."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.failure import Failure
from phalanx.core.work import check_timeout
from phalanx.errors import PeerLostError
from phalanx.native.engine import LibraryBackend
from phalanx.native.mpi.library import MpiLibrary, duplicate, hosts, looks_at_once
from phalanx.native.mpi.steps import import_mpi

LAST_WORDS = 1.0  # seconds that abort() waits at most for the others to be told


class MpiBackend(LibraryBackend):
    """One rank of an MPI communicator, with MPI's own collectives. CPU memory only.

    comm      an intra-communicator of mpi4py: each of its ranks makes a backend. None: all ranks
              that `mpirun` has started; a process that it has not is a world of one
    timeout   seconds that a call waits at most, the epoch of the ranks included

    It works on duplicates of `comm`, so that nothing mixes with what else is sent there. They are
    kept until MPI ends, after `close()` too: a message that comes late to one that was freed could
    be taken for another's. MPI has no deadline: a collective that times out breaks its group, and
    the memory that it was given is kept until MPI ends. When a rank dies, `mpirun` ends the whole
    job, this rank included; an exception ends one rank only, and the others wait for it until their
    timeout, unless the script is started with `python -m mpi4py`, which then ends the job.

    Raises `BackendUnavailableError` without mpi4py or an MPI library, and if MPI was started for
    fewer threads than `MPI.THREAD_MULTIPLE`; `CollectiveTimeoutError` if ranks do not come.
    """

    def __init__(self, comm: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        check_timeout(timeout)
        mpi = import_mpi()
        given = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(given, mpi.Intracomm):
            raise TypeError(f"comm must be an intra-communicator of mpi4py, not {given!r}")
        own, messages = (duplicate(given, timeout) for _ in ("collectives", "messages"))
        topology = hosts(mpi, own)
        looks = looks_at_once(topology.count(topology[own.Get_rank()]))
        libraries = MpiLibrary(mpi, own, looks), MpiLibrary(mpi, messages, looks)
        super().__init__(*libraries, topology, timeout=timeout)

    @override
    def abort(self) -> None:
        """Leave as if this rank had died. MPI would end the job; the others are told instead."""
        engine = self._engine
        with engine.lock:
            if not engine.closed:
                reason = f"rank {self.rank} was lost: it aborted"
                failure = Failure(PeerLostError, self.rank, self.rank, reason)
                for group in list(engine.groups.values()):
                    engine.tell(group, failure)
                engine.say_goodbye(LAST_WORDS)  # groups that are made from now on know, too
        super().abort()
