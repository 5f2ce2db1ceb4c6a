"""pytest as one rank of an MPI job: rank 0 speaks, the others only if something failed there.

    mpirun -n 4 python tests/mpi_ranks.py [what pytest takes]

Only tests that run on a cluster are run, on the cluster "mpi".
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
from collections.abc import Iterator

import clusters
import pytest
from mpi_cluster import Mpi

PATIENCE = 60.0  # seconds for a test; a rank that hangs says where, and the job ends


class Plugin:
    """What these runs of pytest do differently."""

    def __init__(self) -> None:
        self._errors = os.dup(2)  # pytest has another one while a test runs

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        others = [item for item in items if not _is_on_mpi(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=self._errors)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _is_on_mpi(item: pytest.Item) -> bool:
    """Others, also those marked `wide`, are for ranks that are threads: `make test` runs them."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return isinstance(parameters.get("cluster"), Mpi)


def main() -> int:
    clusters.CLUSTERS[:] = [Mpi()]
    words = ["-p", "no:cacheprovider", *sys.argv[1:]]
    said = io.StringIO()
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    with contextlib.redirect_stdout(said) if rank else contextlib.nullcontext():
        code = pytest.main(words, plugins=[Plugin()])
    if rank and code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        print(f"rank {rank}:\n{said.getvalue()}", flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
