"""Groups of many ranks over TCP: `python tests/scripts/wide.py [--ranks 64,256,1024]`.

The ranks are threads of a few processes of this machine; one of them has a process of its own. All
form a group, then meet in barriers of 8 bytes, call every collective and compare what they get with
the sum that they expect. Then that process is killed while most ranks wait in a barrier and every
fourth computes: each that waits has to name that rank, and within a second. A row says

    formed        seconds from the first rank's start to the last one's group
    connections   of a rank when it is formed: mean and most; then after all collectives
    KiB a rank    that the processes have grown by when it is formed, threads included
    barrier       milliseconds of the first, which opens connections, and median of the next ones
    collectives   how many of the calls were right, of how many
    told          how many ranks named the one that died, of how many, and seconds of the slowest

all_to_all, which needs a connection between any two ranks, runs in groups of 16 consecutive ranks.
The exit code is 0 if all was right, and of up to 256 ranks each was told within a second: with more
this machine's processors are what word waits for.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import sys
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import phalanx
from phalanx import Backend, PeerLostError, TcpBackend

TOKEN = "the token of many ranks"
WITHIN, UP_TO = 1.0, 256  # seconds for word of a death; ranks
SQUARE = 16  # ranks of a group in which each has something for each other one
BARRIERS = 5
TIMEOUT = 120.0
SWITCH = (
    0.05  # seconds that a thread keeps the interpreter: with hundreds, less is mostly switching
)
PATIENCE = 180.0


class Formed(NamedTuple):
    """What one process saw of the forming."""

    began: float
    ended: float
    connections: list[int]
    kibibytes: int


class Tried(NamedTuple):
    """What one process saw of the calls."""

    first_barrier: float
    barriers: list[float]
    right: int
    calls: int
    connections: list[int]


def _square_group(backend: Backend) -> Backend:
    first = backend.rank // SQUARE * SQUARE
    return backend.subgroup(range(first, min(first + SQUARE, backend.world_size)))


def _calls(backend: Backend) -> Iterable[Callable[[], bool]]:
    """Every collective once; each says whether its result is right."""
    rank, size = backend.rank, backend.world_size
    total, root = size * (size - 1) / 2, size // 2
    mine, row = torch.tensor([float(rank)]), torch.arange(size, dtype=torch.float32)
    square = _square_group(backend)
    here = torch.arange(square.world_size, dtype=torch.float32)
    return (
        lambda: phalanx.all_reduce(mine, backend).item() == total,
        lambda: phalanx.broadcast(mine, backend, root=root).item() == root,
        lambda: (
            (got := phalanx.reduce(mine, backend, root=root)) is None
            or rank != root
            or got.item() == total
        ),
        lambda: torch.equal(phalanx.all_gather(mine, backend).flatten(), row),
        lambda: phalanx.reduce_scatter(row, backend).item() == rank * size,
        lambda: (
            (got := phalanx.gather(mine, backend, root=root)) is None
            or torch.equal(got.flatten(), row)
        ),
        lambda: phalanx.scatter(row, backend, root=root).item() == rank,
        lambda: (phalanx.all_to_all(here, square) == square.rank).all().item(),
        lambda: phalanx.broadcast_object(rank, backend, root=root) == root,
        lambda: phalanx.all_gather_object(rank, backend) == list(range(size)),
    )


class Ranks:
    """Some ranks as threads of this process; each step is done by all of them at a time."""

    def __init__(self, ranks: range, size: int, address: str) -> None:
        self.size, self.address = size, address
        self.ranks = ranks
        self.backends: dict[int, Backend] = {}

    def each(self, step: Callable[[int], Any]) -> dict[int, Any]:
        """Call that for every rank, each in a thread; what they return."""
        results: dict[int, Any] = {}

        def run(rank: int) -> None:
            try:
                results[rank] = step(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def form(self) -> Formed:
        gc.collect()
        before, began = _kibibytes(), monotonic()
        made = self.each(
            lambda r: TcpBackend(r, self.size, self.address, token=TOKEN, timeout=TIMEOUT)
        )
        ended = monotonic()
        wrong = [each for each in made.values() if not isinstance(each, TcpBackend)]
        if wrong:
            raise wrong[0]
        self.backends = made
        return Formed(began, ended, self._connections(), _kibibytes() - before)

    def _connections(self) -> list[int]:
        return [len(each._transport.mesh.connections) for each in self.backends.values()]

    def call(self) -> Tried:
        def barriers(rank: int) -> list[float]:
            taken = []
            for _ in range(1 + BARRIERS):
                began = monotonic()
                self.backends[rank].barrier()
                taken.append(monotonic() - began)
            return taken

        def calls(rank: int) -> list[bool]:
            return [bool(call()) for call in _calls(self.backends[rank])]

        times, outcomes = self.each(barriers), self.each(calls)
        for outcome in (*times.values(), *outcomes.values()):
            if isinstance(outcome, Exception):
                print(f"a call failed: {outcome}", file=sys.stderr)
        good = [each for each in times.values() if isinstance(each, list)]
        right = [each for each in outcomes.values() if isinstance(each, list)]
        return Tried(
            max((each[0] for each in good), default=0.0),
            [statistics.median(each[1:]) for each in good],
            sum(sum(each) for each in right),
            len(self.ranks) * len(list(_calls(self.backends[self.ranks[0]]))),
            self._connections(),
        )

    def wait_for_a_death(self, victim: int) -> dict[int, tuple[float, bool]]:
        """When each rank that waits was told, and whether it named the right one."""

        def wait(rank: int) -> tuple[float, bool] | None:
            if rank % 4 == 0 and rank:
                sleep(2 * WITHIN)  # as if it computed
                return None
            try:
                self.backends[rank].barrier()
            except PeerLostError as error:
                return monotonic(), error.peer == victim
            return monotonic(), False

        return {rank: told for rank, told in self.each(wait).items() if told is not None}


def _kibibytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def be_a_process(ranks: range, size: int, address: str, victim: int, pipe: Connection) -> None:
    """Do what comes through the pipe, with these ranks."""
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)
    sys.setswitchinterval(SWITCH)
    here = Ranks(ranks, size, address)
    steps = {
        "form": here.form,
        "call": here.call,
        "die": lambda: here.wait_for_a_death(victim),
    }
    pipe.send("ready")
    while (step := pipe.recv()) != "end":
        pipe.send(steps[step]())
    os._exit(0)


def try_size(size: int, processes: int) -> tuple[list[str], bool]:
    """A row of the table, and whether all was right."""
    victim = size // 2 + 1
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    bounds = [victim * part // (processes // 2) for part in range(processes // 2 + 1)]
    rest = processes - processes // 2
    bounds += [victim + 1 + (size - victim - 1) * part // rest for part in range(rest + 1)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["phalanx.backends"])
    jobs = []
    for first, stop in pairwise(bounds):
        mine, theirs = context.Pipe()
        arguments = (range(first, stop), size, address, victim, theirs)
        jobs.append((context.Process(target=be_a_process, args=arguments), mine, first))
    for process, _, _ in jobs:
        process.start()
    pipes = [pipe for _, pipe, _ in jobs]

    def everyone(step: str, some: list[Connection] = pipes) -> list[Any]:
        for pipe in some:
            pipe.send(step)
        return [_next(pipe) for pipe in some]

    for pipe in pipes:
        _next(pipe)
    formed: list[Formed] = everyone("form")
    tried: list[Tried] = everyone("call")
    survivors = [pipe for _, pipe, first in jobs if first != victim]
    for pipe in survivors:
        pipe.send("die")
    sleep(WITHIN)  # until they wait
    (dying,) = (process for process, _, first in jobs if first == victim)
    assert dying.pid is not None
    died = monotonic()
    os.kill(dying.pid, signal.SIGKILL)
    told = {rank: each for pipe in survivors for rank, each in _next(pipe).items()}
    for pipe in survivors:
        pipe.send("end")
    for process, _, _ in jobs:
        process.join()
    named = sum(right for _, right in told.values())
    slowest = max(when for when, _ in told.values()) - died
    right, calls = sum(each.right for each in tried), sum(each.calls for each in tried)
    at_first = [count for each in formed for count in each.connections]
    row = [
        str(size),
        f"{max(each.ended for each in formed) - min(each.began for each in formed):.2f} s",
        f"{statistics.mean(at_first):.1f}, {max(at_first)}",
        f"{max(max(each.connections) for each in tried)}",
        f"{sum(each.kibibytes for each in formed) // size}",
        f"{max(each.first_barrier for each in tried) * 1e3:.0f}, "
        f"{statistics.median([t for each in tried for t in each.barriers]) * 1e3:.1f}",
        f"{right} of {calls}",
        f"{named} of {len(told)}, {slowest:.2f} s",
    ]
    return row, right == calls and named == len(told) and (slowest <= WITHIN or size > UP_TO)


def _next(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise TimeoutError("a process says nothing")
    return pipe.recv()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,256,1024", help="sizes of the group")
    parser.add_argument(
        "--processes", type=int, default=8, help="beside that of the rank that dies"
    )
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    table = Table(box=box.MARKDOWN)
    for heading in (
        "ranks",
        "formed",
        "connections",
        "at the end",
        "KiB a rank",
        "barrier, ms",
        "collectives",
        "told of a death",
    ):
        table.add_column(heading, justify="right")
    right = True
    for size in options.ranks.split(","):
        row, well = try_size(int(size), options.processes)
        table.add_row(*row)
        right = right and well
    console = Console()
    console.width = max(110, console.width)
    console.print(f"ranks as threads of {options.processes} processes, over TCP", table, sep="\n")
    sys.exit(not right)


if __name__ == "__main__":
    main()
