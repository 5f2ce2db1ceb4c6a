"""A stock program under every launcher, and with every way to meet: see stock_program.py.

`python tests/torch_backend/torch_ways.py [BACKEND]` runs each. Its ranks find the backend "phalanx"
by themselves, which takes an installed package.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))

import stock_program
from launchers import RUN, environ_without_launcher
from mpi_jobs import MPIRUN
from ports import unused_port
from warm_python import warm_python
from worlds import run_gloo

PROGRAM = str(Path(__file__).with_name("stock_program.py"))
PATIENCE = 120.0  # seconds for a job
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
MPI = (MPIRUN or "mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "2", sys.executable)

LAUNCHERS: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "torchrun": (TORCHRUN, "env"),
        "phalanx run": ((*RUN, "-n", "2"), "env"),
        "mpirun": (MPI, "env"),
        "env://": ((), "env"),
        "tcp://": ((), "tcp"),
        "file://": ((), "file"),
        "a store": ((), "store"),
    }
)
"""What comes before the program, and how it meets. Without a launcher, ranks are started here."""


def run(name: str, backend: str = "phalanx", rounds: int = 1) -> str:
    """What the job prints. Raises `RuntimeError` with all it said if it fails."""
    launcher, way = LAUNCHERS[name]
    program = [PROGRAM, backend, way, str(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **environ_without_launcher(),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(unused_port()),
            "MEETING_FILE": f"{folder}/meeting",
        }
        if launcher:
            if name == "torchrun":  # it imports torch itself, as its ranks do
                launcher = (warm_python(), *launcher[1:])
                environ["PYTHON_EXEC"] = sys.executable
            jobs = [_start([*launcher, *program], environ)]
        else:
            ranks = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
            jobs = [_start([sys.executable, *program], environ | each) for each in ranks]
        try:
            said = [job.communicate(timeout=PATIENCE) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
    if any(job.returncode for job in jobs):
        raise RuntimeError("\n".join([name, *(err for _, err in said)]))
    return "".join(out for out, _ in said)


def _start(words: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environ, stdout=pipe, stderr=pipe, text=True)


def expected(backend: str = "phalanx") -> str:
    """What it prints if it comes to the loss of one process."""
    (loss,) = run_gloo(lambda _: stock_program.train(stock_program.model()), 1)
    return f"{backend} {loss:.5f}\n"


def main() -> None:
    backend = (sys.argv[1:] or ["phalanx"])[0]
    right = 0
    for name in LAUNCHERS:
        try:
            good = expected(backend) in (said := run(name, backend))
        except RuntimeError as error:
            good, said = False, str(error)
        print(f"{name:12} {'as one process' if good else said}", flush=True)
        right += good
    print(f"{right} of {len(LAUNCHERS)}")
    sys.exit(right != len(LAUNCHERS))


if __name__ == "__main__":
    main()
