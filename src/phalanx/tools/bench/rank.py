"""One rank of a benchmark: makes the peers, goes through operations and sizes, and tells rank 0's.

Every rank does the same, in the same order; what one of them cannot do, none does.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter

import torch

from phalanx.collectives.tuning import root_of
from phalanx.launch.environment import read_environment
from phalanx.launch.init import init
from phalanx.tools.bench.operations import (
    OPERATIONS,
    Exchange,
    Memory,
    Operation,
    count_wrong,
    fill,
    kinds_for,
    longest_stretch,
    poison,
)
from phalanx.tools.bench.peak import measure_peak
from phalanx.tools.bench.peers.backends import Ours
from phalanx.tools.bench.peers.peer import Control, Peer, Place
from phalanx.tools.bench.peers.table import PEERS
from phalanx.tools.bench.records import (
    PEAK,
    Ask,
    Contender,
    LeftOut,
    Line,
    Made,
    Message,
    Progress,
    show_size,
)

Tell = Callable[[Message], None]


def run_rank(ask: Ask, tell: Tell) -> None:
    """This rank's part; `tell` is called on rank 0, with what is found as it is found."""
    torch.set_num_threads(ask.threads)
    world = read_environment(os.environ)
    with init("tcp", timeout=ask.timeout) as backend:
        control = Control(backend)
        master = world.master_addr if world is not None else ""
        place = Place(
            control, master, ask.timeout / 2, ask.width
        )  # who waits for a peer is waited for, too
        with _peers(ask, place, tell if control.rank == 0 else _silent) as peers:
            for name in ask.operations:
                if ask.measure == (PEAK,):
                    _peaks(ask, OPERATIONS[name], peers, control, tell)
                else:
                    _Sweep(ask, OPERATIONS[name], peers, control, tell).run()
        control.barrier()


def _silent(message: Message) -> None:
    """Every rank but the first."""


def _peaks(
    ask: Ask, operation: Operation, peers: dict[str, Peer], control: Control, tell: Tell
) -> None:
    """Each peer's peak of memory; there should be one peer only."""
    for name, peer in peers.items():
        found = measure_peak(name, peer, operation, ask, control)
        if control.rank == 0:
            tell(found)


@contextmanager
def _peers(ask: Ask, place: Place, tell: Tell) -> Iterator[dict[str, Peer]]:
    """All that were asked for and can be made on every rank."""
    made: dict[str, Peer] = {}
    control = place.control
    try:
        for name in ask.backends:
            tell(Progress(f"{place.size} ranks: starting {name}"))
            row = PEERS[name]
            problem = control.problem(row.lacks())
            if not problem:
                here = ""
                try:
                    made[name] = row.make(place)
                except Exception as error:
                    here = f"{type(error).__name__}: {error}"
                problem = control.problem(here)
            peer = made.get(name)
            if problem:
                tell(LeftOut(name, place.size, problem))
                if peer is not None:
                    del made[name]
                    with suppress(Exception):
                        peer.close()
            elif isinstance(peer, Ours):
                root = root_of(peer.backend)
                tell(Made(name, type(root).__name__, root.topology))
        yield made
    finally:
        for peer in made.values():
            with suppress(Exception):  # what was measured counts
                peer.close()


def _named(words: Sequence[str], known: tuple[str, ...]) -> list[str]:
    """Which of the `known` algorithms (`auto` is the first) the words mean; else `auto`."""
    meaning = {"all": known, "fixed": known[1:]}
    named = [name for word in words for name in meaning.get(word, (word,))]
    return list(dict.fromkeys(name for name in named if name in known)) or ["auto"]


class _Sweep:
    """One operation, through the sizes."""

    def __init__(
        self, ask: Ask, operation: Operation, peers: dict[str, Peer], control: Control, tell: Tell
    ) -> None:
        self.ask = ask
        self.operation = operation
        self.peers = peers
        self.control = control
        self.tell = tell if control.rank == 0 else _silent
        self.contenders = list(self._contenders())

    def run(self) -> None:
        """Measure every size."""
        sizes = self.ask.sizes if self.operation.source is not None else [0]
        for size in sizes:
            self._measure(size)

    def _contenders(self) -> Iterator[Contender]:
        """Who takes part."""
        for name, peer in self.peers.items():
            if self.operation.name not in peer.binders:
                if not PEERS[name].machine:
                    reason = "it has no such operation"
                    self.tell(LeftOut(name, self.control.size, reason, self.operation.name))
                continue
            kinds = kinds_for(self.operation, self.ask.memories)
            kinds = [peer.only] if peer.only else [kind for kind in kinds if kind in peer.memories]
            algorithms = _named(self.ask.algorithms, peer.algorithms(self.operation))
            if PEERS[name].machine:
                kinds = ["ordinary"]
            elif not kinds:
                reason = f"it has no memory of a kind asked for ({', '.join(self.ask.memories)})"
                self.tell(LeftOut(name, self.control.size, reason, self.operation.name))
            for kind, algorithm in itertools.product(kinds, algorithms):
                yield Contender(name, kind, algorithm)

    def _measure(self, size: int) -> None:
        control, operation = self.control, self.operation
        memory = Memory()
        where = f"{operation.name}, {control.size} ranks, {show_size(size)}"
        exchanges: dict[str, Exchange] = {}
        by_name = {str(contender): contender for contender in self.contenders}
        failures: dict[str, str] = {}
        for name, contender in by_name.items():
            here = ""
            try:
                exchanges[name] = self.peers[contender.peer].exchange(
                    operation, size, contender.memory, contender.algorithm, memory
                )
            except Exception as error:
                here = f"{type(error).__name__}: {error}"
            if problem := control.problem(here):
                exchanges.pop(name, None)
                failures[name] = problem
        timings, refused = time_rounds(
            exchanges,
            control,
            rounds=self.ask.rounds,
            seconds=self.ask.seconds,
            said=lambda text: self.tell(Progress(f"{where}: {text}")),
        )
        for name, reason in (failures | refused).items():
            self.contenders.remove(by_name[name])
            self.tell(LeftOut(name, control.size, reason, operation.name))
        for name, timing in timings.items():
            self.tell(
                Line(
                    operation=operation.name,
                    ranks=control.size,
                    bytes=4 * operation.fitting(control.size, size),
                    contender=by_name[name],
                    calls=timing.calls,
                    seconds=timing.seconds,
                    bus=exchanges[name].operation.bus(control.size),
                    wrong=timing.wrong,
                )
            )


# ------------------------------------------------------------------------------
# The clock: rounds of the contenders, interleaved.
#
#     round 1   A A A A   B B   C C C C C C
#     round 2   B B   C C C C C C   A A A A         each begins in turn, after a barrier
#     ...
#
# A round of one contender is so many calls, one after the other, that small messages can be timed;
# how many is measured beforehand, and the same on every rank. Its time is that of the slowest rank
# (the NCCL tests' `-a 3`): an operation is over when the last rank has its result. Between the
# calls there may be stops, at which results are looked at and written anew while the clock stands
# still.

_MOST_CALLS = 10_000


@dataclass
class Timing:
    """What one contender took, on the slowest rank, and how many elements were wrong on all."""

    calls: int = 1
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


class _Runner:
    """One contender's exchange on this rank, with its values."""

    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        self.exchange = exchange
        operation, source = exchange.operation, exchange.source
        elements = 0
        if source is not None:
            elements = source.numel() * (1 if operation.source else size)
        self.given = operation.given(rank, size, elements)
        self.gotten = operation.gotten(rank, size, elements)
        self.in_place = exchange.in_place
        self.least = operation.least
        self.longest = longest_stretch(operation, size, in_place=self.in_place)
        self.growth = size if operation.name == "all_reduce" and self.in_place else 1
        self.filled = False

    def run(self, calls: int) -> tuple[float, int]:
        """The seconds of as many calls, and how many elements came out wrong."""
        seconds, wrong = 0.0, 0
        while calls:
            stretch = min(calls, self.longest)
            calls -= stretch
            seconds += self._stretch(stretch)
            wrong += self._wrong(stretch)
        return seconds, wrong

    def _stretch(self, calls: int) -> float:
        exchange = self.exchange
        self._write(exchange)
        call = exchange.call
        began = perf_counter()
        for _ in range(calls):
            call()
        if exchange.finish is not None:
            exchange.finish()
        return perf_counter() - began

    def _write(self, exchange: Exchange) -> None:
        source, out = exchange.source, exchange.out
        if source is not None and self.gotten and out is not None and out is not source:
            poison(out)
        if self.in_place or not self.filled:
            if source is not None:
                fill(source, self.given)
            exchange.load()
            self.filled = True

    def _wrong(self, calls: int) -> int:
        self.exchange.store()
        wrong = self.exchange.count_wrong(calls)
        if self.exchange.out is not None:
            wrong += count_wrong(self.exchange.out, self.gotten, float(self.growth) ** (calls - 1))
        return wrong


def time_rounds(
    exchanges: Mapping[str, Exchange],
    control: Control,
    *,
    rounds: int,
    seconds: float,
    said: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time every exchange; every rank calls this with the same ones.

    rounds   that count
    seconds  that a round should take where calls are short
    said     is told what is being done

    Returns a timing for each exchange, and for those that could not do it the reason.
    """
    runners: dict[str, _Runner] = {}
    timings: dict[str, Timing] = {}
    failures: dict[str, str] = {}
    for name, exchange in exchanges.items():
        said(f"{name}: warming up")
        runner = _Runner(exchange, control.rank, control.size)
        problem = _warm_up(runner, timing := Timing(), control, seconds)
        if problem:
            failures[name] = problem
        else:
            runners[name], timings[name] = runner, timing
    order = list(runners)
    for number in range(rounds if order else 0):
        said(f"round {number + 1} of {rounds}")
        own: dict[str, float] = {}
        for place in range(len(order)):
            name = order[(number + place) % len(order)]
            control.barrier()
            runners[name].filled = False  # another may have written to the same memory
            spent, wrong = runners[name].run(timings[name].calls)
            own[name] = spent / runners[name].exchange.operation.trips
            timings[name].wrong += wrong
        for name, slowest in zip(order, control.slowest([own[n] for n in order]), strict=True):
            timings[name].seconds.append(slowest / timings[name].calls)
    for name in order:
        timings[name].wrong = sum(control.gather(timings[name].wrong))
    return timings, failures


def _warm_up(runner: _Runner, timing: Timing, control: Control, seconds: float) -> str:
    """Find out how many calls make a round; return why it cannot be done, or nothing."""
    calls, passes = 1, 0
    while True:
        control.barrier()
        problem, spent, wrong = "", 0.0, 0
        try:
            spent, wrong = runner.run(calls)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if problem := control.problem(problem):
            return problem
        timing.wrong += wrong
        passes += 1
        (spent,) = control.slowest([spent])
        wanted = min(_MOST_CALLS, round(seconds * calls / max(spent, 1e-9)))
        wanted = max(runner.least, wanted)
        # The first pass connects, compiles and touches memory: it says little.
        if passes > 1 and (spent > seconds / 2 or calls >= wanted):
            timing.calls = wanted
            return ""
        calls = min(wanted, 8 * calls)
