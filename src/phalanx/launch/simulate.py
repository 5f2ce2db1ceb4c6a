"""`simulate`: run a distributed function on many ranks in this process, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from phalanx.core.backend import DEFAULT_TIMEOUT, Backend
from phalanx.errors import RankStopped
from phalanx.transport.simulated import CooperativeScheduler, SimulatedBackend

T = TypeVar("T")


class Simulation(list[T], Generic[T]):
    """The results of a simulated run, in rank order, and the `seed` that gives the same run."""

    def __init__(self, results: list[T], seed: int) -> None:
        super().__init__(results)
        self.seed = seed


def simulate(
    fn: Callable[[Backend], T], world_size: int, seed: int = 0, *, timeout: float = DEFAULT_TIMEOUT
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

    Raises `InvalidWorldSizeError` if `world_size` is less than 1.
    """
    if not callable(fn):
        raise TypeError(f"simulate takes a function, then the number of ranks, not {fn!r}")
    backends = SimulatedBackend.create_group(world_size, timeout=timeout)
    scheduler = CooperativeScheduler(backends[0].switch, seed)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            scheduler.enter(rank)
            results[rank] = fn(backends[rank])
        except RankStopped:
            pass
        except BaseException as error:
            failures.append(error)
            scheduler.stop()
        finally:
            scheduler.leave(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        scheduler.pass_on()
        scheduler.over.wait()
        for thread in threads:
            thread.join()
    finally:
        scheduler.close()
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # the traceback holds this frame, which would hold the traceback
    return Simulation([results[rank] for rank in range(world_size)], seed)
