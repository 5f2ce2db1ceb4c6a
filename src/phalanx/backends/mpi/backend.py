"""`MpiBackend`: ranks that MPI has started."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from phalanx.backends.base import DEFAULT_TIMEOUT, Backend
from phalanx.backends.engine import WORLD_ID, Group
from phalanx.backends.library.engine import LibraryEngine
from phalanx.backends.messages import check_timeout
from phalanx.backends.mpi.formation import duplicate, hosts
from phalanx.backends.mpi.imported import import_mpi
from phalanx.backends.mpi.library import MpiLibrary

FAREWELL = 5.0  # seconds that close() waits at most for sent words to leave


class MpiBackend(Backend):
    """One rank of an MPI communicator, with MPI's own collectives. CPU memory only.

    comm      an intra-communicator of mpi4py: each of its ranks makes a backend. None: all ranks
              that `mpirun` has started; a process that it has not is a world of one
    timeout   seconds that a call waits at most, the meeting of the ranks included

    It works on duplicates of `comm`, so that nothing mixes with what else is sent there; `close()`
    frees them. MPI has no deadline: a collective that times out breaks its group, and the memory
    that it was given is kept until MPI ends. When a rank dies, `mpirun` ends the whole job, this
    rank included; an exception ends one rank only, and the others wait for it until their timeout,
    unless the script is started with `python -m mpi4py`, which then ends the job.

    Raises `BackendUnavailableError` without mpi4py or an MPI library, and if MPI was started for
    fewer threads than `MPI.THREAD_MULTIPLE`; `CollectiveTimeoutError` if ranks do not come.
    """

    def __init__(self, comm: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        check_timeout(timeout)
        mpi = import_mpi()
        given = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(given, mpi.Intracomm):
            raise TypeError(f"comm must be an intra-communicator of mpi4py, not {given!r}")
        ours = [duplicate(given, timeout) for _ in ("collectives", "messages")]
        self._libraries = collectives, messages = [MpiLibrary(mpi, each) for each in ours]
        engine = LibraryEngine(collectives, messages)
        group = Group(engine, WORLD_ID, tuple(range(collectives.size)))
        super().__init__(engine, group, timeout=timeout)
        self.topology = hosts(mpi, ours[0])
        self.native = engine.native_for(group)
        self._engine = engine

    @override
    def close(self) -> None:
        """Leave: whoever waits for this rank gets a `PeerLostError`. Bounded in time."""
        self._leave(farewell=FAREWELL)

    @override
    def abort(self) -> None:
        """Leave as if this rank had died."""
        self._leave(farewell=0.0)

    def _leave(self, *, farewell: float) -> None:
        engine = self._engine
        with engine.lock:
            if engine.closed:
                return
            for group in list(engine.groups.values()):
                group.close()
            engine.run_ready()
            if farewell:
                engine.say_goodbye(farewell)
            alone = engine.courier is None or len(engine.courier.left) == engine.world_size - 1
            engine.shut()
        if alone:
            for library in self._libraries:
                library.free()
