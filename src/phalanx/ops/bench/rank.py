"""One rank of a benchmark: makes the peers, goes through operations and sizes, takes times.

Every rank does the same, in the same order; if one of them cannot, none does. As a program it is
`python -m phalanx.ops.bench.rank FOLDER [SCRIPT]...`: FOLDER/request.json has the request, scripts
bring further peers, and rank 0 writes its findings to FOLDER/found.jsonl.
"""

from __future__ import annotations

import itertools
import os
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec
import torch
from torch import Tensor

from phalanx.collectives.tuning import root_of
from phalanx.core.recorder import LOG_VARIABLE
from phalanx.launch.environment import read_environment
from phalanx.launch.init import init
from phalanx.launch.reaper import die_with_parent
from phalanx.ops.bench.operations import (
    OPERATIONS,
    BenchOperation,
    PreparedCall,
    count_wrong,
    fill,
    kinds_for,
    longest_stretch,
    values_of,
)
from phalanx.ops.bench.peaks import measure_peak
from phalanx.ops.bench.peers import MACHINE, PEERS, Peer, PeerTable, Phalanx, RankContext
from phalanx.ops.bench.request import (
    BackendInfo,
    BenchRequest,
    Entry,
    LeftOut,
    Message,
    ResultLine,
    show_size,
)
from phalanx.wire.control import learned

REQUEST, FOUND = "request.json", "found.jsonl"

Tell = Callable[[Message], None]


def main(folder: Path, scripts: Sequence[str]) -> None:
    """Run one rank, as a program of its own."""
    die_with_parent(os.getppid())
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=learned(BenchRequest))
    peers = dict(PEERS)
    for script in scripts:
        peers |= runpy.run_path(script)["PEERS"]

    def tell(message: Message) -> None:
        with (folder / FOUND).open("ab") as file:
            file.write(msgspec.json.encode(message) + b"\n")

    run_rank(request, peers, tell)


def run_rank(request: BenchRequest, peers: PeerTable, hear: Tell) -> None:
    """Run this rank's part; call `hear` on rank 0 with each finding."""
    torch.set_num_threads(request.threads)
    world = read_environment(os.environ)
    os.environ.setdefault(LOG_VARIABLE, "warning")  # the report is all that is to be seen
    with init("tcp", timeout=request.timeout) as backend:
        tell: Tell = hear if backend.rank == 0 else lambda message: None
        master = world.master_addr if world is not None else ""
        # Half: other ranks wait for one that waits for a peer.
        wait = request.timeout / 2
        context = RankContext(backend, master, wait, request.width, request.optimizer)
        local_rank = world.local_rank if world is not None else backend.rank
        with (
            busy_processes(0 if local_rank else request.beside),
            _make_peers(request, peers, context, tell) as made,
        ):
            measure = _measure_peaks if request.peaks else _sweep
            for name in request.operations:
                measure(request, OPERATIONS[name], made, context, tell)
        backend.barrier()


_BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` processes that compute all the time; they end with this one."""
    command = [sys.executable, "-I", "-S", "-c", _BUSY]
    processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def _make_peers(
    request: BenchRequest, peers: PeerTable, context: RankContext, tell: Tell
) -> Iterator[dict[str, Peer]]:
    """Make all requested peers that can be made on every rank."""
    made: dict[str, Peer] = {}
    ranks = context.backend.world_size
    try:
        for name in request.backends:
            tell(f"{ranks} ranks: starting {name}")
            problem = context.problem(peers[name].lacks())
            peer: Peer | None = None
            if not problem:
                peer, problem = context.attempt(partial(peers[name].make, context))
            if peer is not None:
                made[name] = peer
            if problem:
                tell(LeftOut(name, ranks, problem))
                if peer is not None:  # only another rank cannot have it
                    with suppress(Exception):
                        made.pop(name).close()
            elif isinstance(peer, Phalanx):
                root = root_of(peer.backend)
                tell(BackendInfo(name, type(root).__name__, root.topology))
        yield made
    finally:
        for peer in made.values():
            with suppress(Exception):  # earlier measurements count
                peer.close()


def _sweep(
    request: BenchRequest,
    operation: BenchOperation,
    peers: Mapping[str, Peer],
    context: RankContext,
    tell: Tell,
) -> None:
    """Time and check all peers on one operation, through the sizes."""
    ranks = context.backend.world_size

    def leave_out(peer: str, reason: str) -> None:
        tell(LeftOut(peer, ranks, reason, operation.name))

    entries = {str(entry): entry for entry in _entries(request, operation, peers, leave_out)}
    for size in request.sizes if operation.moves else (0,):
        where = f"{operation.name}, {ranks} ranks, {show_size(size)}"
        context.buffers.clear()
        calls: dict[str, PreparedCall] = {}
        failures: dict[str, str] = {}
        for name, entry in entries.items():
            prepare = partial(peers[entry.peer].prepare, operation, size)
            prepared, problem = context.attempt(partial(prepare, entry.memory, entry.algorithm))
            if problem:
                failures[name] = problem
            elif prepared is not None:
                calls[name] = prepared
        failures |= time_rounds(
            calls,
            context,
            rounds=request.rounds,
            seconds=request.seconds,
            back_to_back=request.back_to_back,
            say=lambda text: tell(f"{where}: {text}"),  # noqa: B023 -- said at once
        )
        for name, reason in failures.items():
            leave_out(name, reason)
            del entries[name]
        for name, entry in entries.items():
            call = calls[name]
            line = ResultLine(
                operation=operation.name,
                ranks=ranks,
                bytes=4 * operation.fitting(ranks, size),
                entry=entry,
                calls=call.calls,
                seconds=call.seconds,
                bus=call.operation.bus(ranks),
                wrong=call.wrong if call.is_checked else None,
                optimizer=call.optimizer,
            )
            tell(line)


def _measure_peaks(
    request: BenchRequest,
    operation: BenchOperation,
    peers: Mapping[str, Peer],
    context: RankContext,
    tell: Tell,
) -> None:
    """Measure each peer's peak of memory: of one, if it is to have the processes for itself."""
    ranks = context.backend.world_size
    for (name, peer), algorithm in itertools.product(peers.items(), request.algorithms):
        tell(f"{operation.name}, {ranks} ranks: memory of {Entry(name, algorithm=algorithm)}")
        peak = measure_peak(peer, context, operation, algorithm)
        if isinstance(peak, str):
            tell(LeftOut(name, ranks, peak, f"the peaks of {operation.name}"))
        else:
            tell(peak)


def _entries(
    request: BenchRequest,
    operation: BenchOperation,
    peers: Mapping[str, Peer],
    leave_out: Callable[[str, str], None],
) -> Iterator[Entry]:
    """Yield the participants: peers, their memory, and their algorithms."""
    for name, peer in peers.items():
        if operation.name not in peer.does:
            if name not in MACHINE:
                leave_out(name, "it has no such operation")
            continue
        kinds = [k for k in kinds_for(operation, request.memories) if k in peer.memories]
        if name in MACHINE or "ordinary" not in peer.memories:  # for any request
            kinds = list(peer.memories)
        elif not kinds:
            requested = ", ".join(request.memories)
            leave_out(name, f"it has no memory of a kind requested ({requested})")
        known = peer.algorithms(operation)  # `auto` is the first
        meaning = {"all": known, "fixed": known[1:]}
        words = [name for word in request.algorithms for name in meaning.get(word, (word,))]
        named = list(dict.fromkeys(name for name in words if name in known)) or ["auto"]
        for kind, algorithm in itertools.product(kinds, named):
            yield Entry(name, kind, algorithm)


# ------------------------------------------------------------------------------
# The clock: rounds of the entries, interleaved.
#
#     round 1   A A A A   B B   C C C C C C
#     round 2   B B   C C C C C C   A A A A         each begins in turn, after a barrier
#     ...
#
# A round of one entry is so many calls, one after the other, that small messages can be timed; how
# many is measured beforehand, and the same on every rank. Its time is that of the slowest rank (the
# NCCL tests' `-a 3`): an operation is over when the last rank has its result. Calls are done in
# stretches; before a stretch memory is written anew, after it results are looked at, and meanwhile
# the clock stands still.
#
# The mean of a few calls is small for a root that runs ahead, and no call has waited for the last
# of a round. Back to back, rounds have many calls, each is timed, and a rank's time is its median.

_MOST_CALLS = 10_000
MANY_CALLS = 20


def time_rounds(
    calls: Mapping[str, PreparedCall],
    context: RankContext,
    *,
    rounds: int,
    seconds: float,
    back_to_back: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """Time all of the calls; every rank calls this with the same ones.

    A round should take `seconds` if calls are short; `say` gets the progress in words. Returns the
    reason for those that could not do it.
    """
    failures: dict[str, str] = {}
    order: list[PreparedCall] = []
    for name, call in calls.items():
        say(f"{name}: warming up")
        if problem := _warm_up(call, context, seconds, MANY_CALLS if back_to_back else 1):
            failures[name] = problem
        else:
            order.append(call)
    for number in range(rounds if order else 0):
        say(f"round {number + 1} of {rounds}")
        own = [0.0] * len(order)
        for turn in range(number, number + len(order)):
            place = turn % len(order)
            call = order[place]
            context.backend.barrier()
            call.filled = False
            spent = _run(call, call.calls, context, each=back_to_back)
            one = statistics.median(spent) if back_to_back else sum(spent) / call.calls
            own[place] = one / call.operation.trips
        for call, *by_rank in zip(order, *context.gather(own), strict=True):
            call.seconds.append(max(by_rank))
    for call in order:
        call.wrong = sum(context.gather(call.wrong))
        if call.own_steps:
            call.optimizer = max(context.gather(statistics.median(call.own_steps)))
    return failures


def _warm_up(call: PreparedCall, context: RankContext, seconds: float, least: int) -> str:
    """Find the number of calls in a round; return why it cannot be done, or nothing."""
    calls, passes = 1, 0
    while True:
        context.backend.barrier()
        own, problem = context.attempt(partial(_run, call, calls, context))
        if own is None or problem:
            return problem.partition("\n")[0]
        passes += 1
        spent = max(context.gather(sum(own)))
        wanted = min(_MOST_CALLS, round(seconds * calls / max(spent, 1e-9)))
        wanted = max(call.operation.least, least, wanted)
        # The first pass connects, compiles and touches memory: it says little.
        if passes > 1 and (spent > seconds / 2 or calls >= wanted):
            call.calls = wanted
            return ""
        calls = min(wanted, 8 * calls)


def _run(
    call: PreparedCall, calls: int, context: RankContext, *, each: bool = False
) -> list[float]:
    """Return the seconds of as many calls: of each, or of stretches. Count wrong results."""
    operation, seconds = call.operation, list[float]()
    rank, size = context.backend.rank, context.backend.world_size
    expected = values_of(operation.expected, rank, size, call.n)
    summed_up = operation.name == "all_reduce" and call.in_place
    longest = longest_stretch(operation, size, in_place=call.in_place)
    while calls:
        stretch = min(calls, longest)
        calls -= stretch
        if expected and not call.in_place:
            fill(call.out, ())
        if call.in_place or not call.filled:
            fill(call.source, values_of(operation.given, rank, size, call.n))
            call.load()
            call.filled = True
        seconds += _time(call, stretch, each=each)
        call.store()
        call.wrong += call.count_wrong(stretch)
        factor = float(size) ** (stretch - 1) if summed_up else 1.0
        call.wrong += count_wrong(call.out, expected, factor)
    return seconds


def _time(call: PreparedCall, calls: int, *, each: bool) -> list[float]:
    once, finish = call.call, call.finish
    result: object = None
    seconds: list[float] = []
    began = perf_counter()
    for _ in range(calls):
        result = once()
        if each:
            ended = perf_counter()
            seconds.append(ended - began)
            began = ended
    finish()
    seconds.append(perf_counter() - began)
    if each:  # the rest of the last call
        seconds[-2:] = [sum(seconds[-2:])]
    if call.fresh and isinstance(result, Tensor):
        call.out = result
    return seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
