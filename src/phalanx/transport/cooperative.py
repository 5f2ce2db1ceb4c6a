"""`CooperativeScheduler`: of many processes that are threads of this one, one runs at a time.

A process has the turn until it waits for something that is not complete. Which of the ready ones
gets it next is drawn from a seed; so a run is the same every time, and different seeds give
different orders.

    running --waits---> waiting  --its operation ends--> ready --is drawn--> running
            --sleeps--> sleeping --the clock is there--> ready

If none is ready, the clock jumps to the end of the first sleep. If none sleeps either, they wait
for each other in a cycle, or for a rank that has returned: a deadlock, detected when it happens.

A process that crashes does so when it would get a certain turn of its own: to its peers it is lost,
and it does nothing any more. One that arrives is there from a certain turn of all.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.core.posted import Wait
from phalanx.core.random_state import RandomStates
from phalanx.core.work import Work
from phalanx.errors import DeadlockError, MisuseError, RankStopped

if TYPE_CHECKING:
    from phalanx.transport.simulated import SimulatedTransport

IDLE_LOOKS = 10_000  # in a row, with nothing happening on any rank, that count as a deadlock


class CooperativeScheduler:
    """Schedules processes, each in a thread of its own.

    size         number of processes that are there from the start; those that arrive come behind
    crashes      for processes that crash, the turn of their own that they do not get any more
    arrivals     for each process that arrives, the turn of all from which it is there
    lock, ready_works   of all groups of these processes
    turns        number of turns that each process has had
    now          the time: seconds that the clock has jumped
    transports   the ranks that each process is, of all its groups
    """

    def __init__(
        self,
        size: int,
        seed: int,
        crashes: Mapping[int, int],
        arrivals: Sequence[int],
    ) -> None:
        everyone = size + len(arrivals)
        self.lock = threading.RLock()
        self.ready_works: deque[Work[Any]] = deque()
        self.turns = [0] * everyone
        self.now = 0.0
        self.transports: defaultdict[int, list[SimulatedTransport]] = defaultdict(list)
        self._over = threading.Event()
        self._draw = random.Random(seed)
        self._random_states = RandomStates(everyone, seed)
        self._turn = [threading.Lock() for _ in range(everyone)]  # released: it is its turn
        for lock in self._turn:
            lock.acquire()
        self._threads: dict[int, threading.Thread] = {}
        self._failures: list[BaseException] = []
        self._crashes = crashes
        self._arrivals = deque(sorted((turn, size + n) for n, turn in enumerate(arrivals)))
        self._waiting: dict[int, Wait] = {}
        self._sleeping: dict[int, tuple[float, Callable[[], object]]] = {}
        self._ready = list(range(size))
        self._finished: set[int] = set()
        self._crashed: set[int] = set()
        self._stopping = False
        self._idle_looks = 0  # at works that were not done, and at the clock, since one was last

    def run(self, body: Callable[[int], object]) -> None:
        """Call `body(process)` in every process, and return when all have ended.

        If one fails, the others are stopped in their waits, and its error is raised here.
        """
        self._body = body
        try:
            for process in list(self._ready):
                self._start(process)
            self._pass_on()
            self._over.wait()
            for thread in self._threads.values():
                thread.join()
        finally:
            self._random_states.close()
        if self._failures:
            try:
                raise self._failures[0]
            finally:
                self._failures.clear()  # the traceback has this frame, and that the traceback

    def _start(self, process: int) -> None:
        thread = threading.Thread(
            target=self._be, args=(process,), name=f"rank {process}", daemon=True
        )
        self._threads[process] = thread
        thread.start()

    def _be(self, process: int) -> None:
        """Run one process, in its thread, from its first turn to its end."""
        try:
            self._take(process)
            self._body(process)
        except RankStopped:
            pass
        except BaseException as error:
            if process not in self._crashed:
                self._failures.append(error)
                self._stop()
        finally:
            self._finished.add(process)
            self._pass_on()

    # Called by the processes ----------------------------------------------------------------

    def wait(self, process: int, until: Wait) -> None:
        """Return when `until` is over. Lock not held."""
        while not until.over:
            self._check_thread(process, until.group.engine.rank)
            self._waiting[process] = until
            self._pass_on()
            self._take(process)

    def pause(self, process: int, rank: int) -> None:
        """Let others run. `DeadlockError` for a rank that polls in vain. Lock not held."""
        self._check_thread(process, rank)
        self._idle_looks += 1
        if self._idle_looks > IDLE_LOOKS:
            self._idle_looks = 0
            raise DeadlockError(
                f"rank {rank}: deadlock: it has asked {IDLE_LOOKS} times whether an operation is "
                "done, and nothing has happened on any rank meanwhile:"
                f"{self._picture() or ' no other rank waits'}",
                rank=rank,
            )
        self.give_turn(process)

    def give_turn(self, process: int) -> None:
        """Let any of the ready processes run, this one among them. Lock not held."""
        self._check_alive(process)
        self._ready.append(process)
        self._pass_on()
        self._take(process)

    def sleep(
        self, process: int, seconds: float, over: Callable[[], object] = lambda: False
    ) -> None:
        """Sleep for so long on the scheduler's clock, or until `over()` is true. Lock not held."""
        self._check_alive(process)
        self._sleeping[process] = self.now + seconds, over
        self.look()
        self._pass_on()
        self._take(process)

    def look(self) -> None:
        """Wake the processes that sleep until something is so, and it is: something has changed."""
        self._rouse([process for process, (_, over) in self._sleeping.items() if over()])

    def wake(self, process: int) -> None:
        """Note that a work of this process has ended. Lock held."""
        self._idle_looks = 0
        until = self._waiting.get(process)
        if until is not None and until.over:
            del self._waiting[process]
            self._ready.append(process)

    # Who is next ----------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Let one of the ready processes run: the first one, or the next when one waits."""
        while self._arrivals and self._arrivals[0][0] <= sum(self.turns):
            self._arrive()
        if not self._ready:
            self._idle()
        if self._ready:
            place = self._draw.randrange(len(self._ready))
            self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
            self._turn[self._ready.pop()].release()
        else:
            self._over.set()

    def _stop(self) -> None:
        """End the waits of all processes with `RankStopped`: one rank has failed."""
        self._stopping = True
        self._arrivals.clear()
        self._rouse(list(self._sleeping))
        self._ready += self._waiting
        self._waiting.clear()

    def _take(self, process: int) -> None:
        self._turn[process].acquire()
        self._random_states.give_to(process)
        if self._stopping:
            raise RankStopped(f"rank {process} was stopped because another rank failed")
        if self.turns[process] == self._crashes.get(process):
            self._crashed.add(process)  # its code may still clean up, and wait no more
            with self.lock:
                for transport in self.transports[process]:
                    transport.leave("its process has crashed")
            self._check_alive(process)
        self.turns[process] += 1

    def has_ended(self, process: int) -> bool:
        """Return whether a process has crashed, or come to its end."""
        return process in self._crashed or process in self._finished

    def _check_alive(self, process: int) -> None:
        if process in self._crashed:
            raise RankStopped(f"process {process} has crashed")

    def _arrive(self) -> None:
        _, process = self._arrivals.popleft()
        self._ready.append(process)
        self._start(process)

    def _rouse(self, processes: list[int]) -> None:
        for process in processes:
            del self._sleeping[process]
            self._ready.append(process)

    def _idle(self) -> None:
        """Go on though nobody is ready: let the clock jump, or somebody arrive, or all fail."""
        self._idle_looks += bool(self._waiting)
        if self._sleeping and self._idle_looks <= IDLE_LOOKS:
            self.now = max(self.now, min(end for end, _ in self._sleeping.values()))
            self._rouse([each for each, (end, _) in self._sleeping.items() if end <= self.now])
        elif self._arrivals and (self._waiting or self._sleeping):
            self._arrive()
        elif self._waiting:
            self._deadlock()

    def _check_thread(self, process: int, rank: int) -> None:
        if self._threads[process] is not threading.current_thread():
            raise MisuseError(
                f"rank {rank}: under simulate() only the rank's own thread may wait on its "
                "backend; another thread did",
                rank=rank,
            )

    def _deadlock(self) -> None:
        """Fail all waits, as nobody is ready: with a `DesyncError` for ranks that disagree."""
        engines = [wait.group.engine for wait in self._waiting.values()]
        with self.lock:
            for part in [part for each in self._waiting.values() for part in each.parts()]:
                if part.is_collective and not part.over:
                    head = part.group.head_of_queue(part)
                    part.group.checker.ask(head.call, head.waits_for())
            for engine in engines:
                engine.run_ready()
        if self._ready:
            return
        picture = self._picture()
        with self.lock:
            for process, wait in list(self._waiting.items()):
                if wait.over:
                    continue
                peers = wait.waits_for_members()
                error = DeadlockError(
                    f"rank {wait.group.engine.rank}: deadlock in {wait.describe()}: every rank "
                    f"waits and nothing is in flight:{picture}",
                    rank=wait.group.rank,
                    peer=peers[0] if peers else None,
                    op=wait.name,
                    sequence=wait.sequence,
                )
                if isinstance(wait, Work) and wait.is_collective:
                    wait.group.break_alone(wait, error)
                else:
                    wait.fail(error)
                self.wake(process)
            for engine in engines:
                engine.run_ready()

    def _picture(self) -> str:
        """Return the waits, a line each: rank, awaited ranks, operation."""
        lines = []
        for process, wait in sorted(self._waiting.items()):
            rank = wait.group.engine.rank
            processes = next(
                transport.switch.processes
                for transport in self.transports[process]
                if transport.engine is wait.group.engine
            )
            whom = ", ".join(
                f"{peer} (which has returned)" if processes[peer] in self._finished else str(peer)
                for peer in wait.waits_for()
            )
            what = wait.group.head_of_queue(wait).describe()
            lines.append(f"\n  rank {rank} waits for {whom} in {what}")
        return "".join(lines)
