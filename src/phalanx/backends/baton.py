"""The baton: of many ranks in one process, one runs at a time.

A rank keeps the baton until it waits for something that is not there yet. Who gets it next, among
those that could go on, is drawn from a seed; so a run is the same every time, and different seeds
give different orders. When nobody could go on, they wait for each other in a circle, or for a rank
that has returned: a deadlock, seen at the moment when it happens.

    running --waits--> waiting --its operation ends--> ready --is drawn--> running
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from typing_extensions import override

from phalanx.backends.engine import Operation
from phalanx.backends.randomness import RandomStates
from phalanx.backends.simulated import Hub, Scheduler, SimulatedEngine
from phalanx.errors import DeadlockError, MisuseError, RankStopped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.backends.engine import Waited


IDLE_LOOKS = 10_000  # in a row, with nothing happening on any rank, that count as a deadlock


class Baton(Scheduler):
    """Schedules the ranks of a hub. Each rank's thread calls `enter` first and `leave` last."""

    one_thread = True

    def __init__(self, hub: Hub, seed: int) -> None:
        size = len(hub.engines)
        self._hub = hub
        self._draw = random.Random(seed)
        self._random_states = RandomStates(size, seed)
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._thread = [0] * size
        self._waiting: dict[int, Waited] = {}
        self._ready = list(range(size))
        self._finished: set[int] = set()
        self._stopping = False
        self._idle_looks = 0  # at operations that were not done, since one was last
        self.over = threading.Event()
        hub.scheduler = self

    # Called by the ranks' threads -----------------------------------------------------------

    def enter(self, rank: int) -> None:
        """Wait for the baton for the first time."""
        self._thread[rank] = threading.get_ident()
        self._take(rank)

    def leave(self, rank: int) -> None:
        """This rank has returned, or failed: pass the baton on for good."""
        self._finished.add(rank)
        self._pass_on()

    @override
    def wait(self, engine: SimulatedEngine, until: Waited) -> None:
        if until.done:
            return
        self._check_thread(engine.rank)
        while not until.done:
            self._waiting[engine.rank] = until
            self._pass_on()
            self._take(engine.rank)

    @override
    def pause(self, engine: SimulatedEngine, until: Operation) -> None:
        self._check_thread(engine.rank)
        self._idle_looks += 1
        if self._idle_looks > IDLE_LOOKS:
            self._idle_looks = 0
            raise self._polls_in_vain(engine.rank)
        self._ready.append(engine.rank)
        self._pass_on()
        self._take(engine.rank)

    @override
    def wake(self, rank: int) -> None:
        self._idle_looks = 0
        until = self._waiting.get(rank)
        if until is not None and until.done:
            del self._waiting[rank]
            self._ready.append(rank)

    # Called by whoever runs the simulation --------------------------------------------------

    def start(self) -> None:
        """All ranks are at `enter`, or will be: let the first one run."""
        self._pass_on()

    def stop(self) -> None:
        """One rank has failed: the others end where they wait, with `RankStopped`."""
        self._stopping = True
        for rank in list(self._waiting):
            del self._waiting[rank]
            self._ready.append(rank)

    def close(self) -> None:
        """The run is over."""
        self._random_states.close()

    # ----------------------------------------------------------------------------------------

    def _take(self, rank: int) -> None:
        self._turn[rank].acquire()
        self._random_states.give_to(rank)
        if self._stopping:
            raise RankStopped(f"rank {rank} was stopped because another rank failed")

    def _pass_on(self) -> None:
        if not self._ready and self._waiting:
            self._deadlock()
        if self._ready:
            place = self._draw.randrange(len(self._ready))
            self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
            self._turn[self._ready.pop()].release()
        else:
            self.over.set()

    def _check_thread(self, rank: int) -> None:
        if self._thread[rank] != threading.get_ident():
            raise MisuseError(
                f"rank {rank}: under simulate() only the rank's own thread may wait on its "
                "backend; another thread did",
                rank=rank,
            )

    def _deadlock(self) -> None:
        """Nobody can go on: ranks that disagree are told so, the others get the whole picture."""
        with self._hub.lock:
            for part in [part for each in self._waiting.values() for part in each.parts()]:
                if part.is_collective and not part.done:
                    part.group.agreement.ask(part.group.head_of_queue(part))
            self._hub.engines[0].run_ready()
        if self._ready:
            return
        picture = "; ".join(self._waits(sorted(self._waiting)))
        with self._hub.lock:
            for rank, operation in list(self._waiting.items()):
                peers = operation.waits_for()
                error = DeadlockError(
                    f"rank {rank}: deadlock in {operation.describe()}: every rank waits and "
                    f"nothing is in flight: {picture}",
                    rank=operation.group.rank,
                    peer=peers[0] if peers else None,
                    op=operation.name,
                    sequence=operation.sequence,
                )
                if operation.done:
                    continue
                if isinstance(operation, Operation) and operation.is_collective:
                    operation.group.break_alone(operation, error)
                else:
                    operation.fail(error)
                self.wake(rank)
            self._hub.engines[0].run_ready()

    def _polls_in_vain(self, rank: int) -> DeadlockError:
        others = "; ".join(self._waits(sorted(self._waiting))) or "no other rank waits"
        return DeadlockError(
            f"rank {rank}: deadlock: it has asked {IDLE_LOOKS} times whether an operation is done, "
            f"and nothing has happened on any rank meanwhile: {others}",
            rank=rank,
        )

    def _waits(self, ranks: Iterable[int]) -> Iterable[str]:
        for rank in ranks:
            operation = self._waiting[rank]
            group = operation.group
            whole = operation.waiting_for_whole()
            whom = ", ".join(
                f"{peer} (which has returned)" if peer in self._finished else str(peer)
                for peer in whole
            )
            head = group.head_of_queue(operation)
            yield f"rank {rank} waits for {whom} in {head.describe()}"
