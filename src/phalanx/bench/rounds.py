"""The clock: rounds of the contenders, interleaved.

    round 1   A A A A   B B   C C C C C C
    round 2   B B   C C C C C C   A A A A         each begins in turn, after a barrier
    ...

A round of one contender is so many calls, one after the other, that small messages can be timed;
how many is measured beforehand, and the same on every rank. Its time is that of the slowest rank
(the NCCL tests' `-a 3`): an operation is over when the last rank has its result. Between the calls
there may be stops, at which results are looked at and written anew while the clock stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from phalanx.bench.control import Control
from phalanx.bench.exchange import Exchange
from phalanx.bench.operations import longest_stretch
from phalanx.bench.values import count_wrong, fill, poison

__all__ = ["Timing", "time_rounds"]

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
