"""pytest as one rank of an MPI job: rank 0 speaks, the others only if something failed there.

    mpirun -n 4 python tests/mpi_ranks.py [what pytest takes]
"""

from __future__ import annotations

import contextlib
import io
import sys

import clusters
import pytest
from mpi_cluster import Mpi


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only tests that run on a cluster."""
    others = [item for item in items if "cluster" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def main() -> int:
    from mpi4py import MPI

    clusters.CLUSTERS[:] = [Mpi()]
    words = ["--timeout-method=thread", *sys.argv[1:]]  # a rank that hangs ends, and with it the job
    if MPI.COMM_WORLD.rank == 0:
        code = pytest.main(words, plugins=[sys.modules[__name__]])
    else:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = pytest.main(words, plugins=[sys.modules[__name__]])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            print(f"rank {MPI.COMM_WORLD.rank}:\n{said.getvalue()}", flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
