"""The engine over TCP: one connection to each peer, and one reactor.

Whoever waits drives: the thread in `progress` runs the reactor until its operation is done, and
thereby moves everybody's bytes. Other threads that wait meanwhile sleep on a condition. Only when
an asynchronous operation is outstanding is there a thread that drives in the background.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.engine import LONGEST_WAIT, Engine
from phalanx.core.failure import Failure
from phalanx.core.group import Group
from phalanx.core.steps import PostedSend, Step, Ticket
from phalanx.core.work import Operation, Wait
from phalanx.errors import PeerLostError
from phalanx.transport.shm.control import ControlBlock, ShmEpoch
from phalanx.transport.shm.segments import Piece
from phalanx.transport.tcp.heartbeat import Heartbeat
from phalanx.transport.tcp.mesh import Mesh, Reactor
from phalanx.wire.control import Answer, Ask, encode
from phalanx.wire.frame import Kind
from phalanx.wire.handshake import Identity

if TYPE_CHECKING:
    from phalanx.core.common import Source
    from phalanx.transport.shm.domain import HostDomain
EXPIRY_CHECK = 0.25  # seconds between looks at the deadlines of operations nobody waits for
GLANCE_EVERY = 0.01  # seconds between looks at the sockets while calls need none
FIRST_LOOK = 0.05  # seconds that an operation is waited for before its deadlines are looked at


class TcpEngine(Engine):
    """Moves bytes over the sockets of its mesh."""

    def __init__(
        self, identity: Identity, token: bytes, *, loopback_only: bool, heartbeat: float
    ) -> None:
        super().__init__(identity.rank, identity.world_size)
        self.reactor = Reactor()
        self.mesh = Mesh(self, self.reactor, identity, token, loopback_only=loopback_only)
        self.heartbeat_monitor = Heartbeat(self.mesh, heartbeat, self.poll)
        self.domain: HostDomain | None = None  # what the ranks of this host share, if they do
        self._condition = threading.Condition(self.lock)
        self._next_glance = 0.0
        self._driver: int | None = None  # the thread that runs the reactor
        self._background: set[Operation] = set()
        self._thread: threading.Thread | None = None

    def share(self, domain: HostDomain) -> None:
        """From now on, groups have control blocks on the memory of the ranks of this host."""
        self.domain = domain
        self.reactor.watch(domain.wakeup, domain.on_wakeup, read=True)
        domain.begins_to_wait = self.watch_memory
        for peer, connection in self.mesh.connections.items():
            connection.send_queue.ring = domain.rings.get(peer)

    # What an engine does --------------------------------------------------------------------

    @override
    def post(self, operation: Operation, step: Step) -> Ticket:
        if type(step) is not ShmEpoch:
            return self.post_round(operation, step)
        assert self.domain is not None
        ticket = self.domain.post(operation, step)
        if not ticket.done:
            for peer in step.absent():
                self.check_reachable(operation, peer)
            self.watch_memory()
        return ticket

    def watch_memory(self) -> None:
        """Something is to come of which only memory tells. Lock held.

        A thread that sleeps already, and has told no local peer, is woken: it looks, and tells
        them.
        """
        domain, driver = self.domain, self._driver
        if domain is None or driver is None or driver == threading.get_ident():
            return
        if not domain.is_parked:
            self.reactor.wake()

    @override
    def withdraw(self, ticket: Ticket) -> None:
        if self.domain is not None:
            self.domain.forget(ticket)
        super().withdraw(ticket)

    @override
    def run_ready(self) -> None:
        if self.domain is not None and self.domain.waits:
            self.domain.look()
        super().run_ready()

    @override
    def shared_group(self, group: Group) -> ControlBlock | None:
        return self.domain.control(group) if self.domain is not None else None

    @override
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.domain is None:
            return super().empty(shape, dtype)
        with self.lock:
            return self.domain.arena.empty(shape, dtype)

    @override
    def common(self, group: Group) -> Source | None:
        together = group.shared is not None and group.shared.size == group.size
        return Piece() if together else None

    @override
    def transmit(self, send: PostedSend) -> None:
        self.mesh.send(send)

    @override
    def reach(self, peer: int) -> None:
        self.mesh.resume(peer)

    @override
    def retract(self, send: PostedSend) -> None:
        self.mesh.retract(send)

    @override
    def settle(self, send: PostedSend) -> bool:
        return self.mesh.settle(send)

    @override
    def tell(self, group: Group, failure: Failure) -> None:
        # The culprit is told, too, if it lives.
        self._send_to_members(group, Kind.FAILURE, encode(failure.notice()))

    @override
    def announce_leaving(self, group: Group) -> None:
        self._send_to_members(group, Kind.LEAVE_GROUP)

    @override
    def ask(self, peer: int, group: int, ask: Ask) -> None:
        self._send_control(peer, Kind.ASK, encode(ask), group)

    @override
    def answer(self, peer: int, answer: Answer) -> None:
        self._send_control(peer, Kind.ANSWER, encode(answer))

    def _send_to_members(self, group: Group, kind: Kind, payload: bytes = b"") -> None:
        for rank in group.ranks:
            self._send_control(rank, kind, payload, group.id)

    def _send_control(self, peer: int, kind: Kind, payload: bytes, group: int = 0) -> None:
        connection = self.mesh.connections.get(peer)
        if connection is not None and not connection.left:
            connection.send_control(kind, payload, group)

    @override
    def has_left(self, peer: int) -> bool:
        return peer in self.mesh.left

    # Driving --------------------------------------------------------------------------------

    @override
    def progress(self, until: Wait) -> None:
        with self.lock:
            left = min(until.deadline - monotonic(), FIRST_LOOK)  # most are done by then
            while not until.done:
                if left <= 0:
                    self.run_ready()
                elif self._driver is None:
                    self.drive(until, monotonic() + left)
                else:
                    self._condition.wait(min(left, LONGEST_WAIT))
                if not until.done:
                    left = min(until.attend(), self.heartbeat_monitor.attend())

    @override
    def look_at(self, operation: Operation) -> None:
        with self.lock:
            self.poll()
            if not operation.done:
                operation.group.attend(operation)
                self.run_ready()

    @override
    def glance(self, now: float) -> None:
        if now >= self._next_glance:
            self._next_glance = now + GLANCE_EVERY
            self.poll()

    def poll(self) -> None:
        """Move the bytes that can be moved without waiting."""
        with self.lock:
            if self._driver is None and not self.closed:
                self._turn(0.0)

    def drive(self, until: Awaited, deadline: float) -> None:
        """Run the reactor until that is done or the deadline has passed. Lock held."""
        self._driver = threading.get_ident()
        try:
            while not until.done and not self.closed:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return
                self._turn(remaining)
        finally:
            self._driver = None
            self._condition.notify_all()

    def _turn(self, seconds: float) -> None:
        domain = self.domain
        if domain is not None and domain.waits:
            domain.park()
            if self.ready:
                seconds = 0.0
        self.lock.release()
        try:
            events = self.reactor.select(seconds)
        finally:
            self.lock.acquire()
            if domain is not None:
                domain.unpark()
        if not self.closed:
            self.reactor.dispatch(events)
            self.run_ready()

    @override
    def in_background(self, operation: Operation) -> None:
        with self.lock:
            if operation.done:
                return
            self._background.add(operation)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_background, name=f"phalanx rank {self.rank}", daemon=True
                )
                self._thread.start()
            if self._driver is not None and operation.timeout < 4 * EXPIRY_CHECK:
                self.reactor.wake()  # or its deadline might pass before anybody looks at it
            self._condition.notify_all()

    def _run_background(self) -> None:
        with self.lock:
            try:
                self._keep_moving()
            except Exception as error:
                # A fault of ours: whoever waits for this thread must hear of it.
                reason = f"rank {self.rank} stopped moving bytes: {error!r}"
                for group in list(self.groups.values()):
                    group.fail(Failure(PeerLostError, self.rank, self.rank, reason))
                self.run_ready()
                raise

    def _keep_moving(self) -> None:
        soon = 0.0
        while not self.closed:
            if not self._background:
                self._condition.wait()
            elif self._driver is not None:
                self._condition.wait(soon)
            else:
                self.drive(NothingLeft(self._background), monotonic() + soon)
            self.heartbeat_monitor.attend()
            soon = EXPIRY_CHECK
            for operation in list(self._background):
                soon = min(soon, max(0.0, operation.group.attend(operation)))
            self.run_ready()

    @override
    def operation_done(self, operation: Operation) -> None:
        self._background.discard(operation)
        self._condition.notify_all()

    # The end --------------------------------------------------------------------------------

    def say_goodbye(self, seconds: float) -> None:
        """Tell every peer, and see to it that what was sent has left this process. Lock held."""
        for connection in list(self.mesh.connections.values()):
            if not connection.given_up:
                connection.send_control(Kind.LEAVE)
        if self._take_over():
            self.drive(AllSent(self.mesh), monotonic() + seconds)

    def _take_over(self) -> bool:
        """Wait until no other thread drives; False if this one does, further up. Lock held."""
        while self._driver is not None:
            if self._driver == threading.get_ident():
                return False
            self.reactor.wake()
            self._condition.wait(EXPIRY_CHECK)
        return True

    def shut(self) -> None:
        """Close everything. Lock held."""
        if self.closed:
            return
        self.closed = True
        self.mesh.close()
        self._condition.notify_all()
        if self._take_over():
            self.reactor.close()
            if self.domain is not None:
                self.domain.close()
        thread = self._thread
        self.lock.release()
        try:
            self.heartbeat_monitor.end()
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        finally:
            self.lock.acquire()


# ------------------------------------------------------------------------------
# What the reactor is run for: until something is done.


class Awaited(Protocol):
    """Something that will be done."""

    @property
    def done(self) -> bool:
        """Whether it is."""
        ...


class NothingLeft:
    """Until no operation is outstanding in the background."""

    def __init__(self, operations: set[Operation]) -> None:
        self._operations = operations

    @property
    def done(self) -> bool:
        """Whether none is."""
        return not self._operations


class AllSent:
    """Until everything has left this host."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def done(self) -> bool:
        """Whether it has."""
        return self._mesh.all_sent()
