"""Starting the ranks of a benchmark on this host, and listening to them.

All backends meet in the same processes, so there is one way to start them: a fresh process a rank,
with the usual variables in its environment; or under mpirun, if MPI takes part, which sets its own.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from phalanx.bench.peers.mpi import find_mpirun
from phalanx.bench.peers.table import PEERS
from phalanx.bench.records import Ask, LeftOut, Message
from phalanx.bench.resident import GIVES_BACK
from phalanx.bench.worker import ASK, FOUND
from phalanx.errors import DistributedError, InvalidWorldSizeError, PeerLostError
from phalanx.launch.environment import STORE_VARIABLE
from phalanx.launch.scratch import scratch_folder
from phalanx.launch.stopping import GRACE
from phalanx.launch.store import hold_store
from phalanx.launch.warden import Warden, end_session

__all__ = ["run_ranks"]

_POLL = 0.05
_SILENCE = 600.0
"""Seconds without a word from rank 0 after which the ranks are taken to hang."""

_MPI_START = 60.0
"""Seconds that mpirun has to start one process."""

_LAST_WORDS = 30
"""Lines of a failed rank's output that are shown."""


def run_ranks(ask: Ask, ranks: int) -> Iterator[Message]:
    """Run `ask` on so many ranks of this host; yields what rank 0 says, as it says it.

    Whatever ends the iteration, the ranks end with it. Raises `PeerLostError` with the last lines
    of its output when a rank fails, `DistributedError` when nothing has been heard for ten minutes.
    """
    if ranks < 2:
        raise InvalidWorldSizeError(f"{ranks} ranks: it takes two or more to exchange anything")
    for left in _without_mpi(ask, ranks):
        yield left
        backends = tuple(name for name in ask.backends if name != left.peer)
        ask = msgspec.structs.replace(ask, backends=backends)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(scratch_folder()))
        warden = stack.enter_context(Warden(str(folder)))
        (folder / ASK).write_bytes(msgspec.json.encode(ask))
        (folder / FOUND).touch()
        _store, port = hold_store("127.0.0.1", 0, timeout=ask.timeout)
        shared = _environment(ask, port)
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_stop, processes)
        for number, (command, added) in enumerate(_commands(ask, ranks, folder)):
            output = stack.enter_context((folder / f"output-{number}").open("wb"))
            process = subprocess.Popen(
                command,
                env=shared | added,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes.append(process)
            warden.hold(process.pid)
        yield from _listen(folder, processes)


def _without_mpi(ask: Ask, ranks: int) -> Iterator[LeftOut]:
    """Who needs MPI, if it is installed and yet does not start here."""
    needing = [name for name in ask.backends if PEERS[name].needs_mpi and not PEERS[name].lacks()]
    if not needing:
        return
    probe = [*_mpirun(1), sys.executable, "-c", "import mpi4py.MPI"]
    try:
        ended = subprocess.run(
            probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=_MPI_START, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if ended.returncode == 0:
            return
        words = (ended.stderr + ended.stdout).decode(errors="replace").split("\n")
        problem = next((word.strip() for word in reversed(words) if word.strip("- ")), "")
    for name in needing:
        yield LeftOut(name, ranks, f"mpirun does not start anything here: {problem}")


def _mpirun(ranks: int) -> list[str]:
    as_root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [find_mpirun(), *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


def _commands(ask: Ask, ranks: int, folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """What is started, and what each finds in its environment besides."""
    worker = [sys.executable, "-m", "phalanx.bench.worker", str(folder)]
    if not any(PEERS[name].needs_mpi and not PEERS[name].lacks() for name in ask.backends):
        for rank in range(ranks):
            number, size = str(rank), str(ranks)
            names = {"RANK": number, "LOCAL_RANK": number}
            yield worker, names | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return
    yield [*_mpirun(ranks), *worker], {}


def _environment(ask: Ask, port: int) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PHALANX_TOKEN")}
    return env | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        STORE_VARIABLE: f"127.0.0.1:{port}",
        "PHALANX_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": str(ask.threads),
        "PYTHONUNBUFFERED": "1",
        **(GIVES_BACK if ask.gives_back else {}),
    }


def _listen(folder: Path, processes: list[subprocess.Popen[bytes]]) -> Iterator[Message]:
    """What rank 0 writes, until all ranks have ended."""
    heard = time.monotonic()
    with (folder / FOUND).open("rb") as file:
        rest = b""
        while True:
            ended = [process.poll() for process in processes]
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                heard = time.monotonic()
                yield msgspec.json.decode(line, type=Message)
            failed = next((n for n, code in enumerate(ended) if code), None)
            if failed is not None:
                raise _failure(folder, processes, failed)
            if all(code == 0 for code in ended):
                return
            if time.monotonic() - heard > _SILENCE:
                raise DistributedError(
                    f"nothing was heard of the ranks for {_SILENCE:g} s, so they were ended: leave "
                    f"out the backend that was last at work. {_last_words(folder, 0)}"
                )
            time.sleep(_POLL)


def _failure(
    folder: Path, processes: list[subprocess.Popen[bytes]], failed: int
) -> DistributedError:
    deadline = time.monotonic() + GRACE  # whoever lost a peer ends before the peer itself, perhaps
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL)
    words = "\n".join(
        f"--- {'rank ' + str(n) if len(processes) > 1 else 'mpirun'}, exit code {process.poll()}:\n"
        f"{_last_words(folder, n)}"
        for n, process in enumerate(processes)
        if process.poll() != 0
    )
    return PeerLostError(f"a rank of the benchmark failed\n{words}", peer=failed)


def _last_words(folder: Path, number: int) -> str:
    text = (folder / f"output-{number}").read_text(errors="replace")
    return "\n".join(text.splitlines()[-_LAST_WORDS:])


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what is still there."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            end_session(process.pid)
            process.wait()
