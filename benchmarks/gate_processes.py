"""The gate's processes: the two versions' files, their ranks, and programs that run once.

Whatever ends the gate, no process of its stays: ranks end when their connection to it does, and
what is still there after `GRACE` seconds is told to end, then killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

ROOT = Path(__file__).parents[1]
PARTS = ("src", "examples")
START, ANSWER, GRACE = 180.0, 300.0, 5.0  # seconds: to start ranks, to answer, to end
LAST_WORDS = 30  # lines of output that are shown of what has failed
STRANGE = (  # variables of a launcher, and settings, of whoever has started the gate
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_COMM_", "PMI_", "SLURM_", "TORCHELASTIC_"),
    *("PHALANX_", "PYTHON"),
)


class GateError(Exception):
    """Something failed that has to be seen to before anything can be compared."""


class Version(NamedTuple):
    """One of the two that are compared: a copy of its files."""

    name: str
    folder: Path

    def environment(self, added: Mapping[str, str]) -> dict[str, str]:
        """What its processes find: this package, one thread, hashes alike, and no launcher."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(STRANGE)}
        path = {"PYTHONPATH": str(self.folder / "src"), "PYTHONUNBUFFERED": "1"}
        # The entry point of this environment's Phalanx may name what the base does not have yet.
        path["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        return {**kept, **path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **added}

    def check(self, file: str) -> None:
        """`GateError` if the package was imported from elsewhere."""
        if not Path(file).resolve().is_relative_to(self.folder.resolve()):
            raise GateError(f"{self.name}: phalanx was imported from {file}")


def git(*arguments: str) -> bytes:
    """What git says of this repository."""
    ended = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if ended.returncode:
        raise GateError(f"git {arguments[0]}: {ended.stderr.decode().strip()}")
    return ended.stdout


def make_versions(commit: str, folder: Path) -> tuple[Version, Version]:
    """Copy a commit and the working tree, so that both have no bytecode, and neither changes."""
    base, tree = Version("base", folder / "base"), Version("tree", folder / "tree")
    base.folder.mkdir()
    archive = git("archive", "--format=tar", commit, *PARTS)
    subprocess.run(["tar", "-x", "-C", str(base.folder)], input=archive, check=True)
    for part in PARTS:
        skip = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(ROOT / part, tree.folder / part, ignore=skip)
    return base, tree


def variables_by_hand(ranks: int) -> Iterator[dict[str, str]]:
    """What a launcher would leave in the environment of each rank of a new job on this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PHALANX_TOKEN": secrets.token_hex()}
    for rank in map(str, range(ranks)):
        size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        yield {**job, **size, "RANK": rank, "LOCAL_RANK": rank}


def mpirun(ranks: int) -> list[str]:
    """The beginning of a command that starts ranks under MPI."""
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [beside or "mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


def lacks(backend: str) -> str:
    """Why no ranks of this backend can be started here; empty if they can."""
    if backend == "gloo":
        import torch.distributed as dist  # noqa: PLC0415 -- it takes seconds

        return "" if dist.is_available() and dist.is_gloo_available() else "torch has no Gloo"
    if backend == "mpi":
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed"
        probe = [*mpirun(1), sys.executable, "-c", "import mpi4py.MPI"]
        try:
            subprocess.run(probe, capture_output=True, timeout=START, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"mpirun starts nothing here: {error}"
    return ""


class Processes:
    """Some processes of one version, with one file of output."""

    def __init__(self, version: Version, title: str, output: Path) -> None:
        self.version, self.title = version, f"{version.name}, {title}"
        self._output, self._file = output, output.open("wb")
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """One more, out of reach of Ctrl-C: whoever started it ends it."""
        process = subprocess.Popen(
            command,
            env=self.version.environment(variables),
            cwd=self.version.folder,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._all.append(process)

    @property
    def ended(self) -> bool:
        """Whether one has."""
        return any(process.poll() is not None for process in self._all)

    def failure(self, what: str) -> GateError:
        """What happened, and the last lines of output, for which failing ranks have a moment."""
        for process in self._all:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE / len(self._all))
        lines = self._output.read_text(errors="replace").splitlines()[-LAST_WORDS:]
        return GateError("\n".join([f"{self.title}: {what}; the end of its output:", *lines]))

    def wait(self, seconds: float) -> str:
        """Until all have ended well; returns what they have written."""
        deadline = time.monotonic() + seconds
        for process in self._all:
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self.failure(f"it took more than {seconds:g} s") from None
            if code:
                raise self.failure(f"it ended with {code}")
        return self._output.read_text()

    def stop(self, seconds: float) -> None:
        """End what is still there after so many seconds. mpirun ends its ranks when it is told."""
        for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, GRACE)):
            deadline = time.monotonic() + patience
            for process in self._all:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, number)
        for process in self._all:
            process.wait()
        self._file.close()


def run_once(
    version: Version, title: str, output: Path, *commands: tuple[Sequence[str], Mapping[str, str]]
) -> str:
    """Run Python programs of one version together; return what they have written."""
    processes = Processes(version, title, output)
    try:
        for arguments, variables in commands:
            processes.start([sys.executable, *arguments], variables)
        return processes.wait(ANSWER)
    finally:
        processes.stop(0.0)


class Ranks:
    """One version's ranks over one backend: they live, and are idle until they are asked."""

    def __init__(self, version: Version, backend: str, ranks: int, folder: Path) -> None:
        name = f"{version.name}-{backend}-{ranks}"
        self._connections: dict[socket.socket, TextIO] = {}
        self._processes = Processes(version, f"{backend}, {ranks} ranks", folder / f"{name}.out")
        address = folder / name
        address.unlink(missing_ok=True)
        rank = Path(__file__).with_name("gate_rank.py")
        program = [sys.executable, str(rank), str(address), backend]
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen(ranks)
                if backend == "mpi":
                    self._processes.start([*mpirun(ranks), *program], {})
                else:
                    for variables in variables_by_hand(ranks):
                        self._processes.start(program, variables)
                self._meet(listener, ranks)
            for said in self._answers(START):
                version.check(said["file"])
        except BaseException:
            self.close()
            raise

    def time(self, task: str, nbytes: int, calls: int, seconds: float) -> float:
        """The seconds of a call, on the slowest rank."""
        asked = {"task": task, "nbytes": nbytes, "calls": calls, "seconds": seconds}
        for connection in self._connections:
            with suppress(OSError):  # a rank that has ended does not answer, which is seen below
                connection.sendall(json.dumps(asked).encode() + b"\n")
        return max(float(said["seconds"]) for said in self._answers(ANSWER))

    def close(self) -> None:
        """End the ranks."""
        for connection, lines in self._connections.items():
            lines.close()
            connection.close()
        self._processes.stop(GRACE if self._connections else 0.0)

    def _meet(self, listener: socket.socket, ranks: int) -> None:
        listener.settimeout(0.2)
        deadline = time.monotonic() + START
        while len(self._connections) < ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._processes.ended or time.monotonic() > deadline:
                    raise self._processes.failure("a rank did not start") from None
            else:
                connection.setblocking(True)
                self._connections[connection] = connection.makefile()

    def _answers(self, seconds: float) -> Iterator[dict[str, Any]]:
        """A line of each rank."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for connection, lines in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, lines)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._processes.failure(f"no answer within {seconds:g} s")
                for key, _ in ready:
                    lines = selector.unregister(key.fileobj).data
                    said = json.loads(lines.readline() or '{"error": "a rank has ended"}')
                    if "error" in said:
                        raise self._processes.failure(said["error"])
                    yield said
