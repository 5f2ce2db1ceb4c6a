"""A word of rank 0's to all ranks, by way of MPI: for ranks that have nowhere else to meet."""

from __future__ import annotations

from phalanx.backends.mpi.formation import duplicate
from phalanx.backends.mpi.imported import import_mpi
from phalanx.backends.mpi.patience import wait_until
from phalanx.errors import CollectiveTimeoutError

__all__ = ["word_of_rank_0"]

LONGEST = 512  # bytes


def word_of_rank_0(word: str, *, timeout: float) -> str:
    """What rank 0 has called this with; every rank that `mpirun` has started calls it, and blocks.

    Raises `CollectiveTimeoutError` after so many seconds, and `BackendUnavailableError` without
    mpi4py.
    """
    mpi = import_mpi()
    comm = duplicate(mpi.COMM_WORLD, timeout)
    block = bytearray(LONGEST)
    if comm.Get_rank() == 0:
        content = word.encode()
        block[: len(content)] = content
    if not wait_until(comm.Ibcast([block, LONGEST, mpi.BYTE], 0).Test, timeout):
        rank = comm.Get_rank()
        raise CollectiveTimeoutError(
            f"rank {rank} waited {timeout:g} s for MPI to bring the word of rank 0",
            rank=rank,
            peer=0,
            op="init",
            seconds=timeout,
        )
    comm.Free()
    return block.rstrip(b"\0").decode()
