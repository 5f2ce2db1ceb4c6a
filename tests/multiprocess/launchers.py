"""Launchers under test: started with a mark that all of their processes inherit, and counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for scripts that import this

from waiting import PATIENCE, wait_until
from warm_python import warm_python

RUN = [sys.executable, "-m", "phalanx.launch"]  # as `phalanx run`
LAUNCHERS = ("PHALANX_", "TORCH", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_", "SLURM_")

WAYS_TO_WAIT = {
    "sleeps": "signal.pause()",
    "hears no signal": (
        "for name in ('SIGTERM', 'SIGINT', 'SIGHUP'):\n"
        "    signal.signal(getattr(signal, name), signal.SIG_IGN)\n"
        "signal.pause()"
    ),
    "is in a long C call": "ctypes.PyDLL(None).pause()",
    "has processes of its own": (
        "ignore = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); '\n"
        "child = ignore + 'signal.pause()'\n"
        "child_process = subprocess.Popen([sys.executable, '-c', child])\n"
        "multiprocessing.get_context('fork').Process(target=signal.pause).start()\n"
        "signal.pause()"
    ),
}
"""What a rank does, as Python, until it is ended."""

_RUN = """
import ctypes, multiprocessing, os, pathlib, signal, subprocess, sys, time
pathlib.Path(sys.argv[1], os.environ['RANK']).touch()
{wait}
"""

_SPAWN = """
import ctypes, multiprocessing, os, pathlib, signal, subprocess, sys, time
from phalanx.launch.spawn import spawn

def wait(backend):
    pathlib.Path(sys.argv[1], str(backend.rank)).touch()
{wait}

if __name__ == "__main__":
    spawn(wait, 2)
"""


def run_of_warm_ranks() -> list[str]:
    """As `RUN`, for ranks that import torch: they are forks that have it."""
    program = f"import runpy, sys; sys.executable = {warm_python()!r}; "
    module = "runpy.run_module('phalanx.launch', run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", program + module]


def environ_without_launcher() -> dict[str, str]:
    """This process's environment, without a launcher or a token."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


@dataclass
class Launch:
    """A launcher and all that it has started, known by a mark in their environment."""

    words: list[str]
    folder: Path
    environ: dict[str, str] = field(default_factory=environ_without_launcher)

    def __post_init__(self) -> None:
        self._mark = f"TEST_MARK={uuid.uuid4().hex}".encode()
        name, _, value = self._mark.decode().partition("=")
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            self.words,
            env={**self.environ, name: value, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=hear_signals,  # noqa: PLW1509 -- it takes no lock
        )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def alive(self) -> list[int]:
        """Every process of this launch that has not ended."""
        found = []
        for entry in os.scandir("/proc"):
            try:
                if entry.name.isdigit() and self._mark in Path(entry, "environ").read_bytes():
                    state = Path(entry, "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX":
                        found.append(int(entry.name))
            except OSError:  # it has ended while we looked
                continue
        return found

    def wait_for(self, ranks: int) -> None:
        """Wait until so many ranks have begun to wait (they leave a file each)."""
        ready = self.folder / "ready"

        def have_come() -> bool:
            come = len(list(ready.iterdir())) >= ranks
            assert come or self.process.poll() is None, self.process.communicate()
            return come

        wait_until(have_come, f"{ranks} ranks have come")

    def seconds_until_all_have_ended(self) -> float:
        """How long it takes, from now, until no process is left."""
        begin = time.monotonic()
        wait_until(lambda: not self.alive(), lambda: f"{self.alive()} have ended")
        return time.monotonic() - begin


def finish(launch: Launch) -> tuple[int, list[str], list[str]]:
    """The exit code, the lines of output in order of their text, the lines of errors.

    Left out is what a launcher says on a slow machine: that it waits for other nodes.
    """
    out, err = launch.process.communicate(timeout=PATIENCE)
    errors = [line for line in err.splitlines() if " waits for node " not in line]
    return launch.process.returncode, sorted(out.splitlines()), errors


def run_script(text: str, folder: Path, *words: str, ranks: int = 2, **environ: str) -> Launch:
    """Start `phalanx run` on a script of this text, which may import torch, with these words."""
    script = folder / "script.py"
    script.write_text(text)
    run = run_of_warm_ranks() if "phalanx" in text else RUN
    start = [*run, "-n", str(ranks), str(script), *words]
    return Launch(start, folder, {**environ_without_launcher(), **environ})


def hear_signals() -> None:
    """Undo what a shell does to a program in its background."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def launch(how: str, what: str, folder: Path, *options: str) -> Launch:
    """Start two ranks that wait in the way of `what`: by `phalanx run`, or by a script's spawn."""
    (folder / "ready").mkdir(parents=True)
    text = {"run": _RUN, "spawn": _SPAWN}[how]
    wait = WAYS_TO_WAIT[what]
    if how == "spawn":
        wait = "\n".join(f"    {line}" for line in wait.splitlines())
    script = folder / "script.py"
    script.write_text(text.format(wait=wait))
    start = [*RUN, "-n", "2", *options] if how == "run" else [sys.executable]
    return Launch([*start, str(script), str(folder / "ready")], folder)
