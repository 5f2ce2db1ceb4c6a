"""One rank of a benchmark: makes the peers, goes through operations and sizes, holds the clock.

Every rank does the same, in the same order; what one of them cannot do, none does. As a program it
is `python -m phalanx.tools.bench.rank FOLDER [SCRIPT]...`: FOLDER/request.json says what to
measure, scripts bring further peers, and rank 0 writes what it finds to FOLDER/found.jsonl.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from phalanx.collectives.tuning import root_of
from phalanx.launch.environment import read_environment
from phalanx.launch.init import init
from phalanx.launch.reaper import die_with_parent
from phalanx.tools.bench.operations import (
    OPERATIONS,
    POISON,
    VALUES,
    BenchOperation,
    MessageBuffers,
    PreparedCall,
    count_wrong,
    fill,
    kinds_for,
    longest_stretch,
)
from phalanx.tools.bench.peak import measure_peak
from phalanx.tools.bench.peer import Control, Peer, RankContext
from phalanx.tools.bench.peers import MACHINE, PEERS, PeerTable, Phalanx
from phalanx.tools.bench.request import PEAK, BenchRequest, show_size
from phalanx.tools.bench.results import (
    BackendInfo,
    Entry,
    LeftOut,
    Message,
    Progress,
    ResultLine,
)

REQUEST, FOUND = "request.json", "found.jsonl"

Tell = Callable[[Message], None]


def main(folder: Path, scripts: Sequence[str]) -> None:
    """Be a rank, as a program of its own."""
    die_with_parent(os.getppid())
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=BenchRequest)
    peers = dict(PEERS)
    for script in scripts:
        peers |= runpy.run_path(script)["PEERS"]

    def tell(message: Message) -> None:
        with (folder / FOUND).open("ab") as file:
            file.write(msgspec.json.encode(message) + b"\n")

    run_rank(request, peers, tell)


def run_rank(request: BenchRequest, peers: PeerTable, tell: Tell) -> None:
    """This rank's part; `tell` is called on rank 0, with what is found as it is found."""
    torch.set_num_threads(request.threads)
    world = read_environment(os.environ)
    with init("tcp", timeout=request.timeout) as backend:
        control = Control(backend)
        if control.rank != 0:
            tell = _say_nothing
        master = world.master_addr if world is not None else ""
        # Half: who waits for a peer is waited for, too.
        context = RankContext(control, master, request.timeout / 2, request.width)
        with _make_peers(request, peers, context, tell) as made:
            for name in request.operations:
                if request.measure == (PEAK,):  # there should be one peer only
                    for peer_name, peer in made.items():
                        tell(measure_peak(peer_name, peer, OPERATIONS[name], request, control))
                else:
                    sweep = _Sweep(request, OPERATIONS[name], made, control, tell)
                    for size in request.sizes if OPERATIONS[name].source else (0,):
                        sweep.measure(size)
        control.barrier()


def _say_nothing(message: Message) -> None:
    """Every rank but the first."""


@contextmanager
def _make_peers(
    request: BenchRequest, peers: PeerTable, context: RankContext, tell: Tell
) -> Iterator[dict[str, Peer]]:
    """All that were requested and can be made on every rank."""
    made: dict[str, Peer] = {}
    control = context.control
    try:
        for name in request.backends:
            tell(Progress(f"{control.size} ranks: starting {name}"))
            problem = control.problem(peers[name].lacks())
            peer: Peer | None = None
            if not problem:
                peer, problem = control.attempt(partial(peers[name].make, context))
            if peer is not None:
                made[name] = peer
            if problem:
                tell(LeftOut(name, control.size, problem))
                if peer is not None:  # only another rank cannot have it
                    with suppress(Exception):
                        made.pop(name).close()
            elif isinstance(peer, Phalanx):
                root = root_of(peer.backend)
                tell(BackendInfo(name, type(root).__name__, root.topology))
        yield made
    finally:
        for peer in made.values():
            with suppress(Exception):  # what was measured counts
                peer.close()


class _Sweep:
    """One operation, through the sizes."""

    def __init__(
        self,
        request: BenchRequest,
        operation: BenchOperation,
        peers: Mapping[str, Peer],
        control: Control,
        tell: Tell,
    ) -> None:
        self.request = request
        self.operation = operation
        self.peers = peers
        self.control = control
        self.tell = tell
        self.entries = {str(entry): entry for entry in self._find_entries()}

    def _find_entries(self) -> Iterator[Entry]:
        """Who takes part, in what memory, with which algorithms."""
        memories = self.request.memories
        for name, peer in self.peers.items():
            if self.operation.name not in peer.binders:
                if name not in MACHINE:
                    self._leave_out(name, "it has no such operation")
                continue
            kinds = [kind for kind in kinds_for(self.operation, memories) if kind in peer.memories]
            if name in MACHINE:
                kinds = ["ordinary"]
            elif peer.only:
                kinds = [peer.only]
            elif not kinds:
                self._leave_out(
                    name, f"it has no memory of a kind requested ({', '.join(memories)})"
                )
            algorithms = _named(self.request.algorithms, peer.algorithms(self.operation))
            for kind, algorithm in itertools.product(kinds, algorithms):
                yield Entry(name, kind, algorithm)

    def _leave_out(self, peer: str, reason: str) -> None:
        self.tell(LeftOut(peer, self.control.size, reason, self.operation.name))

    def measure(self, size: int) -> None:
        """Time and check everybody on messages of `size` bytes."""
        control, operation = self.control, self.operation
        where = f"{operation.name}, {control.size} ranks, {show_size(size)}"
        memory = MessageBuffers()
        calls: dict[str, PreparedCall] = {}
        failures: dict[str, str] = {}
        for name, entry in self.entries.items():
            prepare = partial(self.peers[entry.peer].prepare, operation, size)
            call, problem = control.attempt(partial(prepare, entry.memory, entry.algorithm, memory))
            if problem:
                failures[name] = problem
            elif call is not None:
                calls[name] = call
        timings, refused = time_rounds(
            calls,
            control,
            rounds=self.request.rounds,
            seconds=self.request.seconds,
            say=lambda text: self.tell(Progress(f"{where}: {text}")),
        )
        for name, reason in (failures | refused).items():
            self._leave_out(name, reason)
            del self.entries[name]
        for name, timing in timings.items():
            self.tell(
                ResultLine(
                    operation=operation.name,
                    ranks=control.size,
                    bytes=4 * operation.fitting(control.size, size),
                    entry=self.entries[name],
                    calls=timing.calls,
                    seconds=timing.seconds,
                    bus=calls[name].operation.bus(control.size),
                    wrong=timing.wrong,
                )
            )


def _named(words: Sequence[str], known: tuple[str, ...]) -> list[str]:
    """Which of the `known` algorithms (`auto` is the first) the words mean; else `auto`."""
    meaning = {"all": known, "fixed": known[1:]}
    named = [name for word in words for name in meaning.get(word, (word,))]
    return list(dict.fromkeys(name for name in named if name in known)) or ["auto"]


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

_MOST_CALLS = 10_000


@dataclass
class Timing:
    """What one entry took, on the slowest rank, and how many elements were wrong on all."""

    calls: int = 1
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


class _Stretches:
    """One entry's calls on this rank, with the values that they take and must give."""

    def __init__(self, call: PreparedCall, rank: int, size: int) -> None:
        self.call = call
        operation, source = call.operation, call.source
        n = 0
        if source is not None:
            n = source.numel() * (size if operation.source == "n/p" else 1)
        self.given = VALUES[operation.given](rank, size, n)
        self.expected = VALUES[operation.expected](rank, size, n)
        self.longest = longest_stretch(operation, size, in_place=call.in_place)
        self.growth = float(size) if operation.name == "all_reduce" and call.in_place else 1.0
        self.filled = False

    def run(self, calls: int) -> tuple[float, int]:
        """The seconds of as many calls, and how many elements came out wrong."""
        seconds, wrong = 0.0, 0
        while calls:
            stretch = min(calls, self.longest)
            calls -= stretch
            self._write()
            seconds += self._time(stretch)
            self.call.store()
            wrong += self.call.count_wrong(stretch)
            if self.call.out is not None:
                factor = self.growth ** (stretch - 1)
                wrong += count_wrong(self.call.out, self.expected, factor)
        return seconds, wrong

    def _time(self, calls: int) -> float:
        call, finish = self.call.call, self.call.finish
        began = perf_counter()
        for _ in range(calls):
            call()
        if finish is not None:
            finish()
        return perf_counter() - began

    def _write(self) -> None:
        source, out = self.call.source, self.call.out
        if self.expected and out is not None and out is not source:
            out.fill_(POISON)
        if self.call.in_place or not self.filled:
            if source is not None:
                fill(source, self.given)
            self.call.load()
            self.filled = True


def time_rounds(
    calls: Mapping[str, PreparedCall],
    control: Control,
    *,
    rounds: int,
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time all of the calls; every rank calls this with the same ones.

    rounds   that count
    seconds  that a round should take where calls are short
    say      is told what is being done

    Returns a timing for each, and for those that could not do it the reason.
    """
    entries: dict[str, _Stretches] = {}
    timings: dict[str, Timing] = {}
    failures: dict[str, str] = {}
    for name, call in calls.items():
        say(f"{name}: warming up")
        stretches = _Stretches(call, control.rank, control.size)
        if problem := _warm_up(stretches, timing := Timing(), control, seconds):
            failures[name] = problem
        else:
            entries[name], timings[name] = stretches, timing
    order = list(entries)
    for number in range(rounds if order else 0):
        say(f"round {number + 1} of {rounds}")
        own: dict[str, float] = {}
        for place in range(len(order)):
            name = order[(number + place) % len(order)]
            control.barrier()
            entries[name].filled = False  # another may have written to the same memory
            spent, wrong = entries[name].run(timings[name].calls)
            own[name] = spent / entries[name].call.operation.trips
            timings[name].wrong += wrong
        for name, slowest in zip(order, control.slowest([own[n] for n in order]), strict=True):
            timings[name].seconds.append(slowest / timings[name].calls)
    for name in order:
        timings[name].wrong = sum(control.gather(timings[name].wrong))
    return timings, failures


def _warm_up(stretches: _Stretches, timing: Timing, control: Control, seconds: float) -> str:
    """Find out how many calls make a round; return why it cannot be done, or nothing."""
    calls, passes = 1, 0
    while True:
        control.barrier()
        result, problem = control.attempt(partial(stretches.run, calls))
        if result is None or problem:
            return problem.partition("\n")[0]
        spent, wrong = result
        timing.wrong += wrong
        passes += 1
        (spent,) = control.slowest([spent])
        wanted = min(_MOST_CALLS, round(seconds * calls / max(spent, 1e-9)))
        wanted = max(stretches.call.operation.least, wanted)
        # The first pass connects, compiles and touches memory: it says little.
        if passes > 1 and (spent > seconds / 2 or calls >= wanted):
            timing.calls = wanted
            return ""
        calls = min(wanted, 8 * calls)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
