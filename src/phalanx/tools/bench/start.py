"""A whole benchmark: on ranks that are started here, or as one rank of a launcher's job."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from phalanx.errors import DistributedError, InvalidWorldSizeError, MisuseError, PeerLostError
from phalanx.launch.environment import STORE_VARIABLE, read_environment
from phalanx.launch.reaper import Warden, end_session
from phalanx.launch.scratch import GRACE, scratch_folder
from phalanx.launch.store import hold_store
from phalanx.tools.bench.operations import OPERATIONS
from phalanx.tools.bench.peak import GIVES_BACK, gives_back, lacks_peaks
from phalanx.tools.bench.peers.libraries import find_mpirun
from phalanx.tools.bench.peers.table import PEERS
from phalanx.tools.bench.records import (
    PEAK,
    TIME,
    Ask,
    LeftOut,
    Message,
    Progress,
    Report,
    describe_machine,
)
from phalanx.tools.bench.worker import ASK, FOUND

_PEAKS = "the peak of memory"
_PEAKS_GIVEN_BACK = f"{_PEAKS} with all freed memory given back"


def new_report(ask: Ask, ranks: Sequence[int]) -> Report:
    """A report without figures. Under a launcher the number of ranks is the launcher's."""
    world = read_environment(os.environ)
    return Report(
        ask=ask,
        ranks=list(ranks) if world is None else [world.world_size],
        machine=describe_machine(),
    )


def run_bench(report: Report, heard: Callable[[Message], None]) -> bool:
    """Measure what the report asks; it fills up, and `heard` gets every message as it comes.

    Under a launcher this process is one of its ranks. Returns whether the report is this
    process's: on every rank but 0 it stays empty. Raises what `run_ranks` does, and `MisuseError`
    if nothing but peaks of memory is asked for under a launcher.
    """

    def hear(message: Message) -> None:
        report.add(message)
        heard(message)

    ask = report.ask
    held = [name for name in ask.operations if OPERATIONS[name].held and PEAK in ask.measure]
    world = read_environment(os.environ)
    if world is not None:
        from phalanx.tools.bench.rank import run_rank  # noqa: PLC0415 -- only if this is one

        reason = "it takes fresh processes for each library, and these are a launcher's"
        if TIME not in ask.measure:
            raise MisuseError(f"--measure {PEAK}: {reason}; run it without one")
        run_rank(msgspec.structs.replace(ask, measure=(TIME,)), hear)
        for name in held if world.rank == 0 else ():
            hear(LeftOut(_PEAKS, world.world_size, reason, name))
        return world.rank == 0
    for number in report.ranks:
        if TIME in ask.measure:
            for message in run_ranks(msgspec.structs.replace(ask, measure=(TIME,)), number):
                hear(message)
        for name in held:
            for message in _run_peaks(report, name, number):
                hear(message)
    return True


def _run_peaks(report: Report, operation: str, ranks: int) -> Iterator[Message]:
    """One library after the other, each with ranks of its own that have nothing else to do."""
    if reason := lacks_peaks():
        yield LeftOut(_PEAKS, ranks, reason, operation)
        return
    if not gives_back():
        reason = "it takes the malloc of glibc (mallopt(3))"
        yield LeftOut(_PEAKS_GIVEN_BACK, ranks, reason, operation)
    for name in report.ask.backends:
        row = PEERS[name]
        if report.lacks(name, operation, ranks) or (row.machine and not row.trains):
            continue
        if problem := row.lacks() or ("" if row.trains else "it has no such operation"):
            yield LeftOut(name, ranks, problem, operation)
            continue
        for given_back in (False, True)[: 1 + gives_back()]:
            yield Progress(f"{operation}, {ranks} ranks: the peak of {name}'s memory")
            ask = msgspec.structs.replace(
                report.ask,
                backends=(name,),
                operations=(operation,),
                measure=(PEAK,),
                gives_back=given_back,
            )
            yield from run_ranks(ask, ranks)


# ------------------------------------------------------------------------------
# Starting the ranks of a benchmark on this host, and listening to them.
#
# All backends meet in the same processes, so there is one way to start them: a fresh process a
# rank, with the usual variables in its environment; or under mpirun, if MPI takes part, which sets
# its own.

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
    worker = [sys.executable, "-m", "phalanx.tools.bench.worker", str(folder)]
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
