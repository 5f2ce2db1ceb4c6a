"""`simulate`: run a distributed function on many ranks in this process, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar, cast

from phalanx.core.backend import DEFAULT_TIMEOUT, Backend
from phalanx.core.call import check_world_size, whole_number
from phalanx.launch.environment import GIVEN
from phalanx.transport.cooperative import CooperativeScheduler
from phalanx.transport.simulated import InProcessSwitch, SimulatedBackend
from phalanx.transport.simulated_process import SimulatedProcess, SimulatedWorld

T = TypeVar("T")


class Simulation(list[T], Generic[T]):
    """The results of a simulated run, in rank order, and the `seed` that gives the same run.

    turns   for each process, how often it had the turn; one that never came had none
    """

    def __init__(self, results: list[T], seed: int, turns: list[int]) -> None:
        super().__init__(results)
        self.seed = seed
        self.turns = turns


def simulate(
    fn: Callable[[Backend], T],
    world_size: int,
    seed: int = 0,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    crashes: Mapping[int, int] | None = None,
    arrivals: Sequence[int] = (),
) -> Simulation[T]:
    """Run `fn(backend)` on `world_size` ranks, threads of this process; return their results.

    One rank runs at a time, until it waits for another; the next one is drawn from `seed`. So the
    run is the same each time on every machine, and another seed gives another order of events. Each
    rank has its own random state (torch, numpy, random), which depends on the seed and the rank;
    the caller's is as before afterwards.

    When all ranks wait and nothing is in flight, each of them gets a `DeadlockError` at once, which
    names the waits. Timeouts play no part: nothing here takes time.

    If a rank raises, a `RankStopped` (which `except Exception` does not catch) stops the others in
    their waits. The error is raised here with its own traceback. A rank must wait for others only
    by way of its backend: one that waits on a queue that another rank fills keeps the scheduler and
    waits for ever.

    # Processes that crash and arrive
    crashes   by process, the number of the turn that it does not get any more, from 0. Ranks are
              processes 0 to `world_size - 1`. The others lose it as if it had been killed
    arrivals  for each further process, the number of all turns before it comes. It runs `fn` with
              a world of one. If all have returned before, it does not come

    The result of a process that crashed, or did not come, is None. The result's `turns` say how
    many turns each process had: so a test can crash it at every one of them.

    # Errors
    Raises `InvalidWorldSizeError` if `world_size` is less than 1; ValueError for a crash of a
    process that there is not, and for negative turns.
    """
    if not callable(fn):
        raise TypeError(f"simulate takes a function, then the number of ranks, not {fn!r}")
    everyone = check_world_size(world_size) + len(arrivals)
    _check_turns(crashes or {}, arrivals, everyone)
    scheduler = CooperativeScheduler(world_size, seed, crashes or {}, arrivals)
    world, together = SimulatedWorld(scheduler), InProcessSwitch(world_size, scheduler)
    results: dict[int, T] = {}

    def run(process: int) -> None:
        arrives = process >= world_size
        switch = InProcessSwitch(1, scheduler, [process]) if arrives else together
        engine = switch.engines[0 if arrives else process]
        its = SimulatedProcess(world, process)
        GIVEN.set(f"process {process} of {everyone} of phalanx.simulate")
        results[process] = fn(SimulatedBackend(engine, timeout=timeout, process=its))

    scheduler.run(run)
    in_order = [cast("T", results.get(process)) for process in range(everyone)]
    return Simulation(in_order, seed, scheduler.turns)


def _check_turns(crashes: Mapping[int, int], arrivals: Sequence[int], processes: int) -> None:
    for process, turn in crashes.items():
        if not 0 <= whole_number(process, "process") < processes or whole_number(turn, "turn") < 0:
            raise ValueError(
                f"simulate(crashes={dict(crashes)}): processes are 0 to {processes - 1}, and their "
                "turns count from 0"
            )
    if any(whole_number(turn, "turn") < 0 for turn in arrivals):
        raise ValueError(f"simulate(arrivals={list(arrivals)}): turns count from 0")
