"""A whole benchmark: on ranks started here, or as one rank of a launcher's job.

All peers meet in the same processes, so there is one way to start them: a fresh process a rank,
with the usual variables in its environment.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import msgspec

from phalanx.errors import (
    BackendUnavailableError,
    DistributedError,
    InvalidWorldSizeError,
    PeerLostError,
)
from phalanx.files import write
from phalanx.launch.environment import STORE_VARIABLE, read_environment
from phalanx.launch.reaper import GRACE, Reaper
from phalanx.launch.report import root_cause
from phalanx.launch.store import StoreServer, listen_for_store
from phalanx.launch.supervisor import Supervisor
from phalanx.ops.bench.peaks import Peak, environments
from phalanx.ops.bench.peers import PEERS, PeerTable
from phalanx.ops.bench.rank import FOUND, REQUEST, run_rank
from phalanx.ops.bench.report import BenchReport
from phalanx.ops.bench.request import BackendInfo, BenchRequest, Message, ResultLine
from phalanx.ops.machine import describe_machine
from phalanx.wire.control import learned


def new_report(
    request: BenchRequest, ranks: Sequence[int], peers: PeerTable = PEERS
) -> BenchReport:
    """Return a report without figures. Under a launcher the number of ranks is the launcher's."""
    world = read_environment(os.environ)
    sizes = list(ranks) if world is None else [world.world_size]
    return BenchReport(request, sizes, describe_machine(), peers)


def run_bench(report: BenchReport, show: Callable[[str], None]) -> bool:
    """Run the report's request, and fill the report; `show` gets the progress in words.

    Under a launcher this process is one of its ranks. Returns whether the report is this process's:
    on every rank but 0 it stays empty. Raises as `run_ranks` does.
    """

    def hear(message: Message) -> None:
        report.add(message)
        if isinstance(message, str):
            show(message)

    world = read_environment(os.environ)
    if world is not None:
        run_rank(report.request, report.peers, hear)
        return world.rank == 0
    timed = msgspec.structs.replace(report.request, peaks=False)
    for ranks in report.ranks:
        for message in run_ranks(timed, ranks, report.peers):
            hear(message)
    for line in report.lines if report.request.peaks else ():
        _measure_peaks(line, report, hear)
    return True


def _measure_peaks(line: ResultLine, report: BenchReport, hear: Callable[[Message], None]) -> None:
    """Add the peaks of memory to a line, each from ranks that do nothing else."""
    request = msgspec.structs.replace(
        report.request,
        operations=(line.operation,),
        backends=(line.entry.peer,),
        algorithms=(line.entry.algorithm,),
    )
    for name, environ in environments().items():
        for message in run_ranks(request, line.ranks, report.peers, environ):
            if isinstance(message, Peak):
                line.peaks[name] = message
            elif not isinstance(message, BackendInfo):  # which is known
                hear(message)


# ------------------------------------------------------------------------------
# Starting the ranks of a benchmark on this host, and listening to them.

_POLL = 0.05
_SILENCE = 600.0  # seconds without a word from rank 0 after which the ranks are taken to hang
_LAST_LINES = 30  # of a failed rank's output, which are shown

_EXECUTE = (
    "import os, signal, sys; os.read(int(sys.argv[2]), 1) or sys.exit(); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
"""What Python runs as a process of the supervisor's, to become a rank."""


def run_ranks(
    request: BenchRequest,
    ranks: int,
    peers: PeerTable = PEERS,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Message]:
    """Run `request` on `ranks` ranks of this host; yield rank 0's messages as they come.

    `environ` is added to the environment of the ranks.

    The ranks end with the iteration. Raises `PeerLostError` with the last lines of its output if a
    rank fails, `DistributedError` after ten minutes of silence.
    """
    if ranks < 2:
        raise InvalidWorldSizeError(f"{ranks} ranks: it takes two or more to exchange anything")
    scripts = dict.fromkeys(peers[name].script for name in request.backends)
    token, job = secrets.token_hex(32), os.environ.get("TORCHELASTIC_RUN_ID", "")
    with (
        _working_folder() as path,
        Reaper(path) as reaper,
        closing(StoreServer(listen_for_store("127.0.0.1", 0), token.encode(), job=job)) as store,
    ):
        folder = Path(path)
        write(str(folder / REQUEST), msgspec.json.encode(request))
        write(str(folder / FOUND), b"")
        program = [sys.executable, "-m", "phalanx.ops.bench.rank", path, *filter(None, scripts)]
        shared = {k: v for k, v in os.environ.items() if not k.startswith("PHALANX_TOKEN")}
        shared |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.endpoint.port),
            STORE_VARIABLE: str(store.endpoint),
            "PHALANX_TOKEN": token,
            "OMP_NUM_THREADS": str(request.threads),
            "PYTHONUNBUFFERED": "1",
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        }

        def open_output(number: int) -> tuple[int, int]:
            output = os.open(folder / f"output-{number}", os.O_WRONLY | os.O_CREAT)
            return output, os.dup(output)

        with Supervisor(reaper, open_output) as supervisor:
            for rank in range(ranks):
                supervisor.start(
                    rank,
                    _EXECUTE,
                    program,
                    environ={**shared, **environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    options=("-I", "-S"),
                    stdin=subprocess.DEVNULL,
                )
            yield from _listen(folder, supervisor)


def _working_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="phalanx-", ignore_cleanup_errors=True)
    except OSError as error:
        raise BackendUnavailableError(
            f"there is no room for the launcher's small files ({error}): set TMPDIR to a folder of "
            "yours that can be written to and is not full"
        ) from error


def _listen(folder: Path, supervisor: Supervisor) -> Iterator[Message]:
    """Yield rank 0's messages, until all ranks have ended."""

    def last_lines(number: int) -> str:
        text = (folder / f"output-{number}").read_text(errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    heard, rest, state = time.monotonic(), b"", ""
    with (folder / FOUND).open("rb") as file:
        while state != "failed":
            state = supervisor.state()
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                heard = time.monotonic()
                yield msgspec.json.decode(line, type=learned(Message))
            if state == "done":
                return
            if time.monotonic() - heard > _SILENCE:
                raise DistributedError(
                    f"nothing was heard of the ranks for {_SILENCE:g} s, so they were ended: leave "
                    f"out the backend that was last at work. {last_lines(0)}"
                )
            supervisor.wait(_POLL)
    deadline = time.monotonic() + GRACE  # a rank that lost a peer may end before the peer itself
    while time.monotonic() < deadline and len(supervisor.exits()) < len(supervisor.ranks):
        supervisor.wait(_POLL)
    said = "".join(
        f"\n--- rank {ended.rank}, exit code {ended.code}:\n{last_lines(ended.rank)}"
        for ended in supervisor.ranks
        if ended.code != 0
    )
    first = root_cause(supervisor.exits())
    assert first is not None
    raise PeerLostError(f"a rank of the benchmark failed{said}", peer=first.rank)
