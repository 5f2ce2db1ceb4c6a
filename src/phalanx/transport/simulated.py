"""`SimulatedBackend`: ranks that are threads of one process.

A message is copied from the sender's memory straight to the receiver's, in the sender's thread,
which then also advances the receiver's work. So no message is ever in flight, and asynchronous
collectives need no thread of their own.

The caller's threads are left to the operating system; or, under `phalanx.simulate`, a
`CooperativeScheduler` lets one run at a time.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import UntypedStorage
from typing_extensions import override

from phalanx.core.backend import DEFAULT_TIMEOUT, Backend
from phalanx.core.call import check_world_size
from phalanx.core.common import zeros
from phalanx.core.engine import LONGEST_WAIT, Engine
from phalanx.core.posted import PostedSend, Wait
from phalanx.core.random_state import RandomStates
from phalanx.core.steps import Place, Source
from phalanx.core.transport import Control, Transport
from phalanx.core.work import Work
from phalanx.errors import DeadlockError, MisuseError, RankStopped
from phalanx.wire.control import Ask

if TYPE_CHECKING:
    from phalanx.core.group import Group


class InProcessSwitch:
    """The shared state of one simulated group: lock, queue of ready works, scheduler.

    scheduler   lets one rank run at a time; None: the operating system schedules their threads
    stored      memory that one rank has allocated and not all others have attached yet, by number
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        ready: deque[Work[Any]] = deque()
        self.scheduler: CooperativeScheduler | None = None
        self.stored: dict[int, UntypedStorage] = {}
        self.numbers = count()
        self.engines = [Engine(rank, size, lock=self.lock, ready=ready) for rank in range(size)]
        for engine in self.engines:
            engine.transport = SimulatedTransport(self, engine)


class SimulatedTransport(Transport):
    """Delivers by copying, under the switch's lock."""

    def __init__(self, switch: InProcessSwitch, engine: Engine) -> None:
        self.switch = switch
        self.engine = engine
        self._over = threading.Condition(switch.lock)

    @property
    @override
    def single_thread(self) -> bool:  # type: ignore[override]
        return self.switch.scheduler is not None

    @override
    def common(self, group: Group) -> Source:
        return StoredMemory(self.switch)

    @override
    def send(self, send: PostedSend) -> None:
        work = send.work
        receiver = self.switch.engines[send.peer]
        receiver.matching.deliver(work.channel, self.engine.rank, send.view, work.call.fingerprint)
        send.complete()

    @override
    def control(self, peer: int, group: int, message: Control) -> None:
        receiver = self.switch.engines[peer]
        # A rank that has closed answers no question, but may still be told of failures.
        if not receiver.closed or not isinstance(message, Ask):
            receiver.on_control(self.engine.rank, group, message)

    @override
    def wait(self, until: Wait) -> None:
        engine, scheduler = self.engine, self.switch.scheduler
        if scheduler is not None:
            scheduler.wait(engine.rank, until)
            return
        with engine.lock:
            while not until.over:
                left = until.attend()
                if left <= 0:
                    engine.run_ready()
                else:
                    self._over.wait(min(left, LONGEST_WAIT))

    @override
    def poll(self, work: Work[Any]) -> None:
        engine, scheduler = self.engine, self.switch.scheduler
        if scheduler is not None:
            scheduler.pause(engine.rank)
            return
        with engine.lock:
            if not work.over:
                work.attend()
                engine.run_ready()

    @override
    def wake(self, work: Work[Any]) -> None:
        scheduler = self.switch.scheduler
        if scheduler is not None:
            scheduler.wake(self.engine.rank)
        else:
            self._over.notify_all()


class SimulatedBackend(Backend):
    """One rank of a group whose ranks are threads of this process.

    Make all of them at once with `create_group(n)` and give one to each thread; or have
    `phalanx.simulate` do both, which also makes the run deterministic. A send is complete when it
    returns, whether or not its receiver has come. Messages that nobody has received yet are
    copied.
    """

    @classmethod
    def create_group(
        cls, world_size: int, *, timeout: float = DEFAULT_TIMEOUT
    ) -> list[SimulatedBackend]:
        """Return the backends of a new group, in rank order; each for a thread of its own.

        Raises `InvalidWorldSizeError` if `world_size` is less than 1.
        """
        switch = InProcessSwitch(check_world_size(world_size))
        return [cls(engine, timeout=timeout) for engine in switch.engines]

    @property
    def switch(self) -> InProcessSwitch:
        """The shared state of this group's ranks."""
        transport = self.engine.transport
        assert isinstance(transport, SimulatedTransport)
        return transport.switch

    def close(self) -> None:
        """Leave: ranks that wait for this one, or will, get a `PeerLostError` at once."""
        self._leave(lost=False)

    def abort(self) -> None:
        """Leave as if this rank had died: the groups that it is in are broken."""
        self._leave(lost=True)

    def _leave(self, *, lost: bool) -> None:
        engine = self.engine
        if engine.forked:
            return
        with engine.lock:
            for group in list(engine.groups.values()):
                group.close()
            if engine.closed:
                return
            engine.closed = True
            for other in self.switch.engines:
                if other is engine:
                    continue
                if lost:
                    other.peer_lost(engine.rank, f"rank {engine.rank} was lost: it aborted")
                else:
                    other.peer_left(engine.rank)
            engine.run_ready()
        for callback in engine.at_close:
            callback()


class StoredMemory(Source):
    """Common memory of ranks that are threads: the other ranks find it in the switch."""

    def __init__(self, switch: InProcessSwitch) -> None:
        self._switch = switch
        self._number = -1

    @override
    def take(self, size: int) -> tuple[UntypedStorage, Place]:
        storage = zeros(size)
        with self._switch.lock:
            self._number = next(self._switch.numbers)
            self._switch.stored[self._number] = storage
        return storage, (self._number, 0, 0)

    @override
    def attach(self, place: Place, size: int) -> UntypedStorage:
        with self._switch.lock:
            return self._switch.stored[place[0]]

    @override
    def close(self) -> None:
        with self._switch.lock:
            self._switch.stored.pop(self._number, None)


# ------------------------------------------------------------------------------
# The cooperative scheduler: of many ranks in one process, one runs at a time.
#
# A rank has the turn until it waits for something that is not complete. Which of the ready ranks
# gets it next is drawn from a seed; so a run is the same every time, and different seeds give
# different orders. If no rank is ready, they wait for each other in a cycle, or for a rank that has
# returned: a deadlock, detected when it happens.
#
#     running --waits--> waiting --its operation ends--> ready --is drawn--> running

IDLE_LOOKS = 10_000  # in a row, with nothing happening on any rank, that count as a deadlock


class CooperativeScheduler:
    """Schedules the ranks of a switch. Each rank's thread calls `enter` first and `leave` last."""

    def __init__(self, switch: InProcessSwitch, seed: int) -> None:
        size = len(switch.engines)
        self._switch = switch
        self._draw = random.Random(seed)
        self._random_states = RandomStates(size, seed)
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._thread = [0] * size
        self._waiting: dict[int, Wait] = {}
        self._ready = list(range(size))
        self._finished: set[int] = set()
        self._stopping = False
        self._idle_looks = 0  # at works that were not done, since one was last
        self.over = threading.Event()
        switch.scheduler = self

    # Called by the ranks' threads -----------------------------------------------------------

    def enter(self, rank: int) -> None:
        """Wait for the turn for the first time."""
        self._thread[rank] = threading.get_ident()
        self._take(rank)

    def leave(self, rank: int) -> None:
        """Pass the turn on for good: this rank has returned, or failed."""
        self._finished.add(rank)
        self.pass_on()

    def wait(self, rank: int, until: Wait) -> None:
        """Return when `until` is over. Lock not held."""
        while not until.over:
            self._check_thread(rank)
            self._waiting[rank] = until
            self.pass_on()
            self._take(rank)

    def pause(self, rank: int) -> None:
        """Let other ranks run. `DeadlockError` for a rank that polls in vain. Lock not held."""
        self._check_thread(rank)
        self._idle_looks += 1
        if self._idle_looks > IDLE_LOOKS:
            self._idle_looks = 0
            raise DeadlockError(
                f"rank {rank}: deadlock: it has asked {IDLE_LOOKS} times whether an operation is "
                "done, and nothing has happened on any rank meanwhile:"
                f"{self._picture() or ' no other rank waits'}",
                rank=rank,
            )
        self._ready.append(rank)
        self.pass_on()
        self._take(rank)

    def wake(self, rank: int) -> None:
        """Note that a work of this rank has ended. Lock held."""
        self._idle_looks = 0
        until = self._waiting.get(rank)
        if until is not None and until.over:
            del self._waiting[rank]
            self._ready.append(rank)

    # Called by whoever runs the simulation --------------------------------------------------

    def pass_on(self) -> None:
        """Let one of the ready ranks run: the first one, or the next when a rank waits."""
        if not self._ready and self._waiting:
            self._deadlock()
        if self._ready:
            place = self._draw.randrange(len(self._ready))
            self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
            self._turn[self._ready.pop()].release()
        else:
            self.over.set()

    def stop(self) -> None:
        """End the waits of all ranks with `RankStopped`: one rank has failed."""
        self._stopping = True
        for rank in list(self._waiting):
            del self._waiting[rank]
            self._ready.append(rank)

    def close(self) -> None:
        self._random_states.close()

    # ----------------------------------------------------------------------------------------

    def _take(self, rank: int) -> None:
        self._turn[rank].acquire()
        self._random_states.give_to(rank)
        if self._stopping:
            raise RankStopped(f"rank {rank} was stopped because another rank failed")

    def _check_thread(self, rank: int) -> None:
        if self._thread[rank] != threading.get_ident():
            raise MisuseError(
                f"rank {rank}: under simulate() only the rank's own thread may wait on its "
                "backend; another thread did",
                rank=rank,
            )

    def _deadlock(self) -> None:
        """Fail all waits, as no rank is ready: with a `DesyncError` for ranks that disagree."""
        with self._switch.lock:
            for part in [part for each in self._waiting.values() for part in each.parts()]:
                if part.is_collective and not part.over:
                    head = part.group.head_of_queue(part)
                    part.group.checker.ask(head.call, head.waits_for())
            self._switch.engines[0].run_ready()
        if self._ready:
            return
        picture = self._picture()
        with self._switch.lock:
            for rank, wait in list(self._waiting.items()):
                if wait.over:
                    continue
                peers = wait.waits_for_members()
                error = DeadlockError(
                    f"rank {rank}: deadlock in {wait.describe()}: every rank waits and "
                    f"nothing is in flight:{picture}",
                    rank=wait.group.rank,
                    peer=peers[0] if peers else None,
                    op=wait.name,
                    sequence=wait.sequence,
                )
                if isinstance(wait, Work) and wait.is_collective:
                    wait.group.break_alone(wait, error)
                else:
                    wait.fail(error)
                self.wake(rank)
            self._switch.engines[0].run_ready()

    def _picture(self) -> str:
        """Return the waits, a line each: rank, awaited ranks, operation."""
        lines = []
        for rank, wait in sorted(self._waiting.items()):
            whom = ", ".join(
                f"{peer} (which has returned)" if peer in self._finished else str(peer)
                for peer in wait.waits_for()
            )
            what = wait.group.head_of_queue(wait).describe()
            lines.append(f"\n  rank {rank} waits for {whom} in {what}")
        return "".join(lines)
