"""Processes of the tests are forks of one server, which has imported what takes seconds.

    fork_server().Process(target=f)    a process that calls a function
    run_python(["script.py", "word"])  a Python program, as `subprocess.run` runs it
    run_job(["script.py", "word"], 2)  one on two ranks, which are started as by a launcher

A program whose start is not what is tested is run in one of these ways: a fresh process would
import torch, which takes two seconds of a processor.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType

from ports import unused_port

PRELOADED = (
    "pytest",
    "phalanx.backends",
    "phalanx.checkpoint",
    "phalanx.fsdp",
    "phalanx.torch_backend.creation",
    "torch._dynamo",  # which the first optimizer of a process imports
    "torch.distributed.fsdp",
)
PATIENCE = 200.0  # seconds for a program to end
WHERE_ARE_YOU = signal.SIGRTMAX  # a program, and what it has forked, tell where their threads are


class Forked(ForkServerProcess):
    """A fork whose garbage collector skips what the server has: to look at it is to copy it, which
    takes a fifth of a second."""

    def run(self) -> None:
        gc.freeze()
        super().run()


class _ForksOfServer(ForkServerContext):
    Process = Forked


def fork_server() -> ForkServerContext:
    """The context whose server all tests of this process share, whichever asks first."""
    context = _ForksOfServer()
    context.set_forkserver_preload([*PRELOADED])
    return context


class PythonProgram:
    """A Python program that runs in a fork of the server.

    words     what follows `python` on a command line: a script, or -m or -c and what goes with it
    environ   its whole environment; that of this process, if it is not given
    folder    in which it runs; that of this process, if it is not given
    python    what it starts as `sys.executable`; the one of this process, if it is not given

    What is read by the start of Python, or by the import of torch, is that of the server: of the
    environment, variables such as PYTHONPATH or MALLOC_TRIM_THRESHOLD_. There is nothing on stdin,
    and `atexit` does nothing.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        folder: Path | str = ".",
        python: str = sys.executable,
    ) -> None:
        self._words = [*words]
        self._output = tempfile.TemporaryDirectory(prefix="output-")
        place = os.path.abspath(folder), self._output.name, python
        environ = dict(os.environ if environ is None else environ)
        self._process = fork_server().Process(target=_become, args=(self._words, environ, *place))
        self._process.start()

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end: the exit code, negative for a signal, and the output as text.

        Of one that does not end, the failure has the stacks of all threads of it and of its forks.
        """
        self._process.join(PATIENCE)
        late = self._process.is_alive()
        if late:
            assert self._process.pid
            family = [*_family(self._process.pid)]
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, WHERE_ARE_YOU)
                time.sleep(0.2)  # each writes in turn
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.join()
        with self._output as folder:
            files = [Path(folder, name) for name in ("out", "err")]
            out, err = (file.read_text() if file.exists() else "" for file in files)
        assert not late, f"{self._words} takes more than {PATIENCE:g} s: {out}{err}"
        return subprocess.CompletedProcess(self._words, self._process.exitcode or 0, out, err)


def run_python(
    words: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | str = ".",
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run a `PythonProgram` to its end."""
    return PythonProgram(words, environ=environ, folder=folder, python=python).finish()


def run_job(
    words: Sequence[str], ranks: int, *, folder: Path | str = ".", **environ: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program on so many ranks of this host, with the environment that a launcher gives."""
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    started = [
        PythonProgram(words, environ={**os.environ, **job, **place, **environ}, folder=folder)
        for place in places
    ]
    return [program.finish() for program in started]


def _family(pid: int) -> Iterator[int]:
    """A process and those that have come from it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def _become(
    words: list[str], environ: dict[str, str], folder: str, output: str, python: str
) -> None:
    for number, name in ((1, "out"), (2, "err")):
        with open(os.path.join(output, name), "ab") as file:
            os.dup2(file.fileno(), number)
    faulthandler.register(WHERE_ARE_YOU, sys.__stderr__, all_threads=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    if "OMP_NUM_THREADS" in environ:
        sys.modules["torch"].set_num_threads(int(environ["OMP_NUM_THREADS"]))
    sys.executable = python
    run_words(words, folder)


def run_words(words: list[str], folder: str) -> None:
    """Do what `python words...` does in that folder, in this process."""
    match words:
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            sys.path.insert(0, folder)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *arguments]:
            sys.argv = ["-c", *arguments]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(main))
        case [script, *_]:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
