"""`SimulatedBackend`: ranks that are threads of one process.

A message is copied from the sender's memory straight to where the receiver wants it, in the
sender's thread, which also carries on the receiver's collective from there. So nothing is ever in
flight, and asynchronous collectives need no thread of their own.

How a rank waits is a `Scheduler`'s business. `FreeThreads` lets the caller's threads run as the
operating system likes; the `CooperativeScheduler` lets one run at a time (see `phalanx.simulate`).
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from torch import UntypedStorage
from typing_extensions import override

from phalanx.core.backend import DEFAULT_TIMEOUT, Backend
from phalanx.core.common import Place, Source, zeros
from phalanx.core.engine import LONGEST_WAIT, Engine
from phalanx.core.failure import Failure
from phalanx.core.group import WORLD_ID, Group
from phalanx.core.random_state import RandomStates
from phalanx.core.steps import PostedSend
from phalanx.core.work import Operation, Wait
from phalanx.errors import DeadlockError, InvalidWorldSizeError, MisuseError, RankStopped
from phalanx.wire.control import Answer, Ask

if TYPE_CHECKING:
    from collections.abc import Iterable


class Scheduler(ABC):
    """How the ranks of a switch wait for each other."""

    one_thread = False  # whether only a rank's own thread may wait

    @abstractmethod
    def wait(self, engine: SimulatedEngine, until: Wait) -> None:
        """Return when that is done. Lock not held."""

    @abstractmethod
    def wake(self, rank: int) -> None:
        """An operation of this rank has ended. Lock held."""

    @abstractmethod
    def pause(self, engine: SimulatedEngine, until: Operation) -> None:
        """Let others run, and see to what is due, without waiting for anything. Lock not held."""


class FreeThreads(Scheduler):
    """Ranks are threads of the caller's, and run whenever the system lets them."""

    def __init__(self, lock: threading.RLock, size: int) -> None:
        self._conditions = [threading.Condition(lock) for _ in range(size)]

    @override
    def wait(self, engine: SimulatedEngine, until: Wait) -> None:
        condition = self._conditions[engine.rank]
        with engine.lock:
            while not until.done:
                left = until.attend()
                if left <= 0:
                    engine.run_ready()
                else:
                    condition.wait(min(left, LONGEST_WAIT))

    @override
    def wake(self, rank: int) -> None:
        self._conditions[rank].notify_all()

    @override
    def pause(self, engine: SimulatedEngine, until: Operation) -> None:
        with engine.lock:
            if not until.done:
                until.group.attend(until)
                engine.run_ready()


class InProcessSwitch:
    """What the ranks of one simulated group share."""

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.ready: deque[Operation] = deque()
        self.scheduler: Scheduler = FreeThreads(self.lock, size)
        self.store = MemoryStore(self.lock)
        self.engines = [SimulatedEngine(self, rank, size) for rank in range(size)]


class SimulatedEngine(Engine):
    """Delivers by copying, under the switch's lock."""

    def __init__(self, switch: InProcessSwitch, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, switch.lock)
        self.switch = switch
        self.ready = switch.ready  # whoever delivers last carries the operation on
        self.left = False

    @property
    @override
    def one_thread(self) -> bool:
        return self.switch.scheduler.one_thread

    @override
    def common(self, group: Group) -> Source:
        return StoredMemory(self.switch.store)

    @override
    def transmit(self, send: PostedSend) -> None:
        operation = send.ticket.operation
        receiver = self.switch.engines[send.peer]
        receiver.matching.deliver(operation.channel, self.rank, send.view, operation.fingerprint)
        send.complete()

    @override
    def reach(self, peer: int) -> None:
        pass

    @override
    def retract(self, send: PostedSend) -> None:
        pass

    @override
    def progress(self, until: Wait) -> None:
        self.switch.scheduler.wait(self, until)

    @override
    def look_at(self, operation: Operation) -> None:
        self.switch.scheduler.pause(self, operation)

    @override
    def operation_done(self, operation: Operation) -> None:
        self.switch.scheduler.wake(self.rank)

    @override
    def tell(self, group: Group, failure: Failure) -> None:
        for rank in group.ranks:
            if rank != self.rank:
                self.switch.engines[rank].failure_came(group.id, failure)

    @override
    def announce_leaving(self, group: Group) -> None:
        for rank in group.ranks:
            if rank != self.rank:
                self.switch.engines[rank].member_left(group.id, self.rank)

    @override
    def ask(self, peer: int, group: int, ask: Ask) -> None:
        engine = self.switch.engines[peer]
        if not engine.closed:
            engine.asked(group, self.rank, ask)

    @override
    def answer(self, peer: int, answer: Answer) -> None:
        self.switch.engines[peer].answered(self.rank, answer)

    @override
    def has_left(self, peer: int) -> bool:
        return self.switch.engines[peer].left

    def leave(self, *, lost: bool) -> None:
        """This rank takes part no more. Lock held."""
        if self.left:
            return
        self.left = self.closed = True
        for engine in self.switch.engines:
            if engine is self:
                continue
            if lost:
                engine.peer_lost(self.rank, f"rank {self.rank} was lost: it aborted")
            else:
                engine.peer_left(self.rank)
        self.run_ready()


class SimulatedBackend(Backend):
    """One rank of a group whose ranks are threads of this process.

    Make all of them at once with `create_group(n)` and give one to each thread; or have
    `phalanx.simulate` do both, which also makes the run deterministic. A send is complete when it
    returns, whether or not its receiver has come. Messages that nobody has received yet are
    copied.
    """

    def __init__(self, engine: SimulatedEngine, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        group = Group(engine, WORLD_ID, tuple(range(engine.world_size)))
        super().__init__(engine, group, timeout=timeout)
        self.topology = (0,) * engine.world_size

    @classmethod
    def create_group(
        cls, world_size: int, *, timeout: float = DEFAULT_TIMEOUT
    ) -> list[SimulatedBackend]:
        """The backends of a new group, in rank order; each for a thread of its own.

        Raises `InvalidWorldSizeError` if `world_size` is less than 1.
        """
        if world_size < 1:
            raise InvalidWorldSizeError(f"a group needs at least one rank, not {world_size}")
        switch = InProcessSwitch(world_size)
        return [cls(engine, timeout=timeout) for engine in switch.engines]

    @property
    def switch(self) -> InProcessSwitch:
        """What this group's ranks share."""
        engine = self.engine
        assert isinstance(engine, SimulatedEngine)
        return engine.switch

    def close(self) -> None:
        """Leave: whoever waits for this rank, or will, gets a `PeerLostError` at once."""
        self._leave(lost=False)

    def abort(self) -> None:
        """Leave as if this rank had died: the groups that it is in are broken."""
        self._leave(lost=True)

    def _leave(self, *, lost: bool) -> None:
        engine = self.switch.engines[self.rank]
        with engine.lock:
            for group in list(engine.groups.values()):
                group.close()
            engine.leave(lost=lost)


# ------------------------------------------------------------------------------
# What ranks that are threads of one process have in common: memory of that process.


class MemoryStore:
    """Memory that was taken by one rank and not attached by all others yet."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.numbers: Iterator[int] = count()
        self.storages: dict[int, UntypedStorage] = {}


class StoredMemory(Source):
    """Memory that others find on the store."""

    def __init__(self, store: MemoryStore) -> None:
        self._shelf = store
        self._number = -1

    @override
    def take(self, size: int) -> tuple[UntypedStorage, Place]:
        storage = zeros(size)
        with self._shelf.lock:
            self._number = next(self._shelf.numbers)
            self._shelf.storages[self._number] = storage
        return storage, (self._number, 0, 0)

    @override
    def attach(self, place: Place, size: int) -> UntypedStorage:
        with self._shelf.lock:
            return self._shelf.storages[place[0]]

    @override
    def close(self) -> None:
        with self._shelf.lock:
            self._shelf.storages.pop(self._number, None)


# ------------------------------------------------------------------------------
# The turn: of many ranks in one process, one runs at a time.
#
# A rank keeps the turn until it waits for something that is not there yet. Who gets it next, among
# those that could go on, is drawn from a seed; so a run is the same every time, and different seeds
# give different orders. When nobody could go on, they wait for each other in a circle, or for a
# rank that has returned: a deadlock, seen at the moment when it happens.
#
#     running --waits--> waiting --its operation ends--> ready --is drawn--> running

IDLE_LOOKS = 10_000  # in a row, with nothing happening on any rank, that count as a deadlock


class CooperativeScheduler(Scheduler):
    """Schedules the ranks of a switch. Each rank's thread calls `enter` first and `leave` last."""

    one_thread = True

    def __init__(self, switch: InProcessSwitch, seed: int) -> None:
        size = len(switch.engines)
        self._hub = switch
        self._draw = random.Random(seed)
        self._random_states = RandomStates(size, seed)
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._thread = [0] * size
        self._waiting: dict[int, Wait] = {}
        self._ready = list(range(size))
        self._finished: set[int] = set()
        self._stopping = False
        self._idle_looks = 0  # at operations that were not done, since one was last
        self.over = threading.Event()
        switch.scheduler = self

    # Called by the ranks' threads -----------------------------------------------------------

    def enter(self, rank: int) -> None:
        """Wait for the turn for the first time."""
        self._thread[rank] = threading.get_ident()
        self._take(rank)

    def leave(self, rank: int) -> None:
        """This rank has returned, or failed: pass the turn on for good."""
        self._finished.add(rank)
        self._pass_on()

    @override
    def wait(self, engine: SimulatedEngine, until: Wait) -> None:
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
                    part.group.checker.ask(part.group.head_of_queue(part))
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
            whole = operation.waits_for_global()
            whom = ", ".join(
                f"{peer} (which has returned)" if peer in self._finished else str(peer)
                for peer in whole
            )
            head = group.head_of_queue(operation)
            yield f"rank {rank} waits for {whom} in {head.describe()}"
