"""A script for mpirun: the last rank is killed, and the others wait for it."""

from __future__ import annotations

import os
import signal

import torch

import phalanx


def main() -> None:
    with phalanx.init("mpi", timeout=300.0) as backend:
        backend.barrier()
        if backend.rank == backend.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        phalanx.all_reduce(torch.ones(3), backend)


if __name__ == "__main__":
    main()
