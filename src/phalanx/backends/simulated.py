"""`SimulatedBackend`: ranks that are threads of one process.

A message is copied from the sender's memory straight to where the receiver wants it, in the
sender's thread, which also carries on the receiver's collective from there. So nothing is ever in
flight, and asynchronous collectives need no thread of their own.

How a rank waits is a `Scheduler`'s business. `FreeThreads` lets the caller's threads run as the
operating system likes; the `Baton` lets one run at a time (see `phalanx.simulate`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque

from typing_extensions import override

from phalanx.backends.base import DEFAULT_TIMEOUT, Backend
from phalanx.backends.common import Source
from phalanx.backends.engine import (
    WORLD_ID,
    Engine,
    Failure,
    Group,
    Operation,
    PostedSend,
    Waited,
)
from phalanx.backends.engine.engine import LONGEST_WAIT
from phalanx.backends.simulated_memory import Shelf, ShelfMemory
from phalanx.errors import InvalidWorldSizeError
from phalanx.wire.messages import Answer, Ask


class Scheduler(ABC):
    """How the ranks of a hub wait for each other."""

    one_thread = False  # whether only a rank's own thread may wait

    @abstractmethod
    def wait(self, engine: SimulatedEngine, until: Waited) -> None:
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
    def wait(self, engine: SimulatedEngine, until: Waited) -> None:
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


class Hub:
    """What the ranks of one simulated group share."""

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.ready: deque[Operation] = deque()
        self.scheduler: Scheduler = FreeThreads(self.lock, size)
        self.shelf = Shelf(self.lock)
        self.engines = [SimulatedEngine(self, rank, size) for rank in range(size)]


class SimulatedEngine(Engine):
    """Delivers by copying, under the hub's lock."""

    def __init__(self, hub: Hub, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, hub.lock)
        self.hub = hub
        self.ready = hub.ready  # whoever delivers last carries the operation on
        self.left = False

    @property
    @override
    def one_thread(self) -> bool:
        return self.hub.scheduler.one_thread

    @override
    def common(self, group: Group) -> Source:
        return ShelfMemory(self.hub.shelf)

    @override
    def transmit(self, send: PostedSend) -> None:
        operation = send.ticket.operation
        receiver = self.hub.engines[send.peer]
        receiver.mailbox.deliver(operation.channel, self.rank, send.view, operation.fingerprint)
        send.complete()

    @override
    def reach(self, peer: int) -> None:
        pass

    @override
    def retract(self, send: PostedSend) -> None:
        pass

    @override
    def progress(self, until: Waited) -> None:
        self.hub.scheduler.wait(self, until)

    @override
    def look_at(self, operation: Operation) -> None:
        self.hub.scheduler.pause(self, operation)

    @override
    def operation_done(self, operation: Operation) -> None:
        self.hub.scheduler.wake(self.rank)

    @override
    def tell(self, group: Group, failure: Failure) -> None:
        for rank in group.ranks:
            if rank != self.rank:
                self.hub.engines[rank].failure_came(group.id, failure)

    @override
    def tell_leaving(self, group: Group) -> None:
        for rank in group.ranks:
            if rank != self.rank:
                self.hub.engines[rank].member_left(group.id, self.rank)

    @override
    def ask(self, peer: int, group: int, ask: Ask) -> None:
        engine = self.hub.engines[peer]
        if not engine.closed:
            engine.asked(group, self.rank, ask)

    @override
    def answer(self, peer: int, answer: Answer) -> None:
        self.hub.engines[peer].answered(self.rank, answer)

    @override
    def has_left(self, peer: int) -> bool:
        return self.hub.engines[peer].left

    def leave(self, *, lost: bool) -> None:
        """This rank takes part no more. Lock held."""
        if self.left:
            return
        self.left = self.closed = True
        for engine in self.hub.engines:
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
        hub = Hub(world_size)
        return [cls(engine, timeout=timeout) for engine in hub.engines]

    @property
    def hub(self) -> Hub:
        """What this group's ranks share."""
        engine = self.engine
        assert isinstance(engine, SimulatedEngine)
        return engine.hub

    def close(self) -> None:
        """Leave: whoever waits for this rank, or will, gets a `PeerLostError` at once."""
        self._leave(lost=False)

    def abort(self) -> None:
        """Leave as if this rank had died: the groups that it is in are broken."""
        self._leave(lost=True)

    def _leave(self, *, lost: bool) -> None:
        engine = self.hub.engines[self.rank]
        with engine.lock:
            for group in list(engine.groups.values()):
                group.close()
            engine.leave(lost=lost)
