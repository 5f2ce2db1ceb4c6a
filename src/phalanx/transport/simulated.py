"""`SimulatedBackend`: ranks that are threads of one process.

A message is copied from the sender's memory straight to the receiver's, in the sender's thread,
which then also advances the receiver's work. So no message is ever in flight, and asynchronous
collectives need no thread of their own.

The caller's threads are left to the operating system; or, under `phalanx.simulate`, a
`CooperativeScheduler` lets one process of the simulation run at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import UntypedStorage
from typing_extensions import override

from phalanx.core.backend import DEFAULT_TIMEOUT, Backend
from phalanx.core.call import check_world_size
from phalanx.core.common import zeros
from phalanx.core.engine import LONGEST_WAIT, Engine
from phalanx.core.posted import PostedSend, Wait
from phalanx.core.steps import Place, Source
from phalanx.core.transport import Control, Transport
from phalanx.core.work import Work
from phalanx.transport.cooperative import CooperativeScheduler
from phalanx.wire.control import Ask

if TYPE_CHECKING:
    from phalanx.core.group import Group
    from phalanx.transport.simulated_process import SimulatedProcess


class InProcessSwitch:
    """The shared state of one simulated group: lock, queue of ready works, scheduler.

    scheduler   lets one process run at a time; None: the operating system schedules the threads
    processes   for each rank its number among the scheduler's processes
    stored      memory that one rank has allocated and not all others have attached yet, by number
    """

    def __init__(
        self,
        size: int,
        scheduler: CooperativeScheduler | None = None,
        processes: Sequence[int] = (),
    ) -> None:
        self.scheduler = scheduler
        self.lock = threading.RLock() if scheduler is None else scheduler.lock
        ready: deque[Work[Any]] = deque() if scheduler is None else scheduler.ready_works
        self.processes = processes or range(size)
        self.stored: dict[int, UntypedStorage] = {}
        self.numbers = count()
        self.engines = [Engine(rank, size, lock=self.lock, ready=ready) for rank in range(size)]
        for engine in self.engines:
            engine.transport = SimulatedTransport(self, engine)


class SimulatedTransport(Transport):
    """Delivers by copying, under the switch's lock.

    process   this rank's number among the scheduler's processes
    """

    def __init__(self, switch: InProcessSwitch, engine: Engine) -> None:
        self.switch = switch
        self.engine = engine
        self.process = switch.processes[engine.rank]
        self._over = threading.Condition(switch.lock)
        if switch.scheduler is not None:
            switch.scheduler.transports[self.process].append(self)

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
            scheduler.wait(self.process, until)
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
            scheduler.pause(self.process, engine.rank)
            return
        with engine.lock:
            if not work.over:
                work.attend()
                engine.run_ready()

    @override
    def wake(self, work: Work[Any]) -> None:
        scheduler = self.switch.scheduler
        if scheduler is not None:
            scheduler.wake(self.process)
        else:
            self._over.notify_all()

    def leave(self, lost: str = "") -> bool:
        """Leave, in good order or lost for a reason; return False if it has left. Lock held."""
        engine = self.engine
        for group in list(engine.groups.values()):
            group.close()
        if engine.closed:
            return False
        engine.closed = True
        for other in self.switch.engines:
            if other is engine:
                continue
            if lost:
                other.peer_lost(engine.rank, f"rank {engine.rank} was lost: {lost}")
            else:
                other.peer_left(engine.rank)
        engine.run_ready()
        return True


class SimulatedBackend(Backend):
    """One rank of a group whose ranks are threads of this process.

    Make all of them at once with `create_group(n)` and give one to each thread; or have
    `phalanx.simulate` do both, which also makes the run deterministic. A send is complete when it
    returns, whether or not its receiver has come. Messages that nobody has received yet are
    copied.

    process   under `phalanx.simulate`, the process that has this rank
    """

    def __init__(
        self,
        engine: Engine,
        group: Group | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        process: SimulatedProcess | None = None,
    ) -> None:
        super().__init__(engine, group, timeout=timeout)
        self.process = process

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
        self._leave()

    def abort(self) -> None:
        """Leave as if this rank had died: the groups that it is in are broken."""
        self._leave("it aborted")

    def _leave(self, lost: str = "") -> None:
        engine = self.engine
        if engine.forked:
            return
        with engine.lock:
            assert isinstance(engine.transport, SimulatedTransport)
            if not engine.transport.leave(lost):
                return
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
