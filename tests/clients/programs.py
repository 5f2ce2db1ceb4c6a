"""Programs for other packages, started as their users start them: on some ranks of this host."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from os import killpg
from pathlib import Path

import pytest
from commands import PHALANX
from launchers import environ_without_launcher

PATIENCE = 300.0  # seconds for a job
HERE = Path(__file__).parent
CLIENT = environ_without_launcher() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "phalanx run": lambda ranks: [*PHALANX, "run", "-n", str(ranks)],
    "torchrun": lambda ranks: [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", f"--nproc-per-node={ranks}"),
    ],
    "the program itself": lambda _: [sys.executable],
}
"""What comes before a program and its arguments, for so many ranks of this host.

Lightning's programs start the other ranks by themselves, where nothing else has started them.
"""


def start(launcher: str, program: str, *words: object, ranks: int = 2, **environ: str) -> str:
    """Run a program of this folder under a launcher; what it prints. It fails if the job does."""
    command = [*LAUNCHERS[launcher](ranks), str(HERE / program), *map(str, words)]
    code, out, err = finish([command], environ)[0]
    assert code == 0, f"{' '.join(command)} ended with {code}\n{out}\n{err}"
    return out


def finish(commands: list[list[str]], environ: dict[str, str]) -> list[tuple[int, str, str]]:
    """Run commands at a time; the exit code, the output and the errors of each. None lives on."""
    pipe = subprocess.PIPE
    jobs = [
        subprocess.Popen(
            command,
            env=CLIENT | environ,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        said = [job.communicate(timeout=PATIENCE) for job in jobs]
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                killpg(job.pid, signal.SIGKILL)
            job.wait()
    return [(job.returncode, *each) for job, each in zip(jobs, said, strict=True)]


def results(out: str) -> list[str]:
    """The lines that begin with "result", of any rank."""
    return re.findall(r"^(?:\[rank \d+\] )?result (.*)$", out, flags=re.MULTILINE)


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test where a package is missing, which is not imported here."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}: it is missing")
