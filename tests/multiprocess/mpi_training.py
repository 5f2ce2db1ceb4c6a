"""A script for mpirun: what `init` makes of it, and a training run over MPI.

Rank 0 prints a line of JSON: the backends that it got, and what came of the training.
"""

from __future__ import annotations

import json

import torch
from test_training import train_on_my_rows

import phalanx


def main() -> None:
    made = []
    for name in ("auto", "tcp", "mpi"):
        with phalanx.init(name, timeout=30.0) as backend:
            total = phalanx.all_reduce(torch.tensor([1.0, backend.rank]), backend)
            made.append([type(backend).__name__, backend.world_size, total.tolist()])
    with phalanx.init("mpi", timeout=30.0) as backend:
        trained = train_on_my_rows(backend)
        everyones = phalanx.all_gather_object(list(trained), backend)
        if backend.rank == 0:
            print(json.dumps({"made": made, "trained": everyones}))


if __name__ == "__main__":
    main()
