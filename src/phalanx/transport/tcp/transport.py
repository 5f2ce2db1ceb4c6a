"""The transport over TCP: one connection to each peer, and one reactor; shared memory beside them.

A thread that waits drives: it runs the reactor until its work is done, which moves the bytes of all
works. Other threads that wait meanwhile sleep on a condition. Only while an asynchronous work is
outstanding does a background thread drive.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.engine import LONGEST_WAIT, Engine
from phalanx.core.posted import PostedSend, Wait
from phalanx.core.steps import Step
from phalanx.core.transport import Control, Transport
from phalanx.core.work import Work
from phalanx.transport.tcp.connection import MESSAGES
from phalanx.transport.tcp.flooding import Flooding
from phalanx.transport.tcp.heartbeat import Heartbeat
from phalanx.transport.tcp.mesh import Mesh
from phalanx.transport.tcp.tls import Tls
from phalanx.wire.control import encode
from phalanx.wire.frame import Kind
from phalanx.wire.handshake import Identity

if TYPE_CHECKING:
    from phalanx.core.group import Group
    from phalanx.core.shared_group import SharedGroup
    from phalanx.core.steps import Source
    from phalanx.core.transport import HostMemory
    from phalanx.transport.tcp.connection import Connection
    from phalanx.transport.tcp.dial import LazyConnection

GLANCE_EVERY = 0.01  # seconds between polls of the sockets while calls need none
# Seconds that a waiting thread polls before it sleeps: being woken takes longer than most small
# messages. Only where no other rank needs its processor, and not while cores are short: the peer
# may wait for this one. Steps in shared memory poll by themselves.
SPIN = 2e-4
SLICE = 0.02  # seconds in a library's wait before the sockets are polled again
EACH_WITH_EACH = 16  # ranks that are all connected from the start; more are a wide mesh
FIRST_LOOK, EXPIRY_CHECK = 0.05, 0.25  # seconds
LOOKS = 200  # polls of a step, one after the other, before the first sleep
SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3  # seconds between later polls
KINDS = {message: kind for kind, message in MESSAGES.items()}


class TcpTransport(Transport):
    """Moves bytes over the sockets of its mesh.

    domain         the memory that the ranks of this host share, if they do
    first_look     seconds that a work is waited for before its deadline is checked
    expiry_check   seconds between checks of the deadlines of works nobody waits for
    """

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        token: bytes,
        *,
        heartbeat: float,
        each_with_each: int = EACH_WITH_EACH,
        tls: Tls | None = None,
    ) -> None:
        self.engine = engine
        engine.transport = self
        self.mesh = Mesh(engine, identity, token, tls)
        self.wide: Flooding | None = None
        if engine.world_size > each_with_each:
            self.mesh.wide = self.wide = Flooding(self.mesh, heartbeat)
        self.reactor = self.mesh.reactor
        self.heartbeat = Heartbeat(self.mesh, heartbeat, self.look)
        self.domain: HostMemory | None = None
        self.first_look = FIRST_LOOK
        self.expiry_check = EXPIRY_CHECK
        self.refused = self.mesh.refused
        self._connections = self.mesh.connections
        self._condition = threading.Condition(engine.lock)
        self._next_glance = 0.0
        self._driver: int | None = None  # the thread that runs the reactor
        self._background: dict[Work[Any], float] = {}  # and when the background thread takes over
        self._thread: threading.Thread | None = None
        self._thread_may_go_on = threading.Condition(engine.lock)
        self._thread_looks_at = 0.0  # when it wakes by itself
        self._looks = 0  # at steps that are polled, since one was complete

    def share(self, domain: HostMemory) -> None:
        """Give groups control blocks in the shared memory of this host, from now on."""
        self.domain = domain
        self.reactor.watch(domain.wakeup, domain.on_wakeup)
        domain.begins_to_wait = self.watch
        self.mesh.shares = True
        for connection in self.mesh.connections.values():
            connection.out = connection.ring

    # Messages -------------------------------------------------------------------------------

    @override
    def send(self, send: PostedSend) -> None:
        # There is none if the peer's loss is just being reported, or before the first message.
        connection = self._connections.get(send.peer)
        if connection is not None:
            connection.send(send)
        elif self.wide is not None and (call := self.wide.call(send.peer)) is not None:
            call.send(send)

    @override
    def cancel(self, send: PostedSend) -> None:
        connection = self._connections.get(send.peer)
        if connection is not None:
            connection.cancel(send)
        elif self.wide is not None and send.peer in self.wide.calls:
            self.wide.calls[send.peer].cancel(send)

    @override
    def finish_send(self, send: PostedSend) -> bool:
        connection = self._connections.get(send.peer)
        return connection is not None and connection.finish_send(send)

    @override
    def room(self, peer: int) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.resume()

    @override
    def control(self, peer: int, group: int, message: Control) -> None:
        connection: Connection | LazyConnection | None = self._connections.get(peer)
        if connection is None and self.wide is not None:
            connection = self.wide.call(peer)
        if connection is None or peer in self.engine.left:
            return
        if message is None:
            connection.send_control(Kind.LEAVE_GROUP, group=group)
        else:
            connection.send_control(KINDS[type(message)], encode(message), group=group)

    @override
    def tell_members(self, group: Group, message: Control) -> None:
        if self.wide is None:
            super().tell_members(group, message)
        else:
            self.wide.tell_members(group, message)

    # Memory ---------------------------------------------------------------------------------

    @override
    def shared(self, group: Group) -> SharedGroup | None:
        return self.domain.shared(group) if self.domain is not None else None

    @override
    def alloc(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.domain is None:
            return super().alloc(shape, dtype)
        with self.engine.lock:
            return self.domain.empty(shape, dtype)

    @override
    def common(self, group: Group) -> Source | None:
        together = group.shared is not None and group.shared.size == group.size
        return self.domain.source() if self.domain is not None and together else None

    # Waiting --------------------------------------------------------------------------------

    @override
    def wait(self, until: Wait) -> None:
        engine, now = self.engine, self.engine.now
        with engine.lock:
            left = min(until.deadline - now(), self.first_look)  # most are done by then
            while not until.over:
                step = _step_of(until) if engine.polled else None
                if left <= 0:
                    self.look()  # however short the timeout, a call moves what it can at once
                    engine.run_ready()
                elif step is not None and step.blocks and step.block(min(left, SLICE)):
                    self.glance(now())  # a look at all sockets would take longer than most steps
                    engine.run_ready()
                elif self._driver is None:
                    crowding, began = self.mesh.crowding, now()
                    polls = self.domain is None and crowding is not None and not crowding.at(began)
                    self.drive(lambda: until.over, began + left, spin=SPIN if polls else 0.0)
                else:
                    self._condition.wait(min(left, LONGEST_WAIT))
                if not until.over:
                    left = min(until.attend(), self.heartbeat.attend())

    @override
    def poll(self, work: Work[Any]) -> None:
        with self.engine.lock:
            self.look()
            if not work.over:
                work.attend()
                self.engine.run_ready()

    @override
    def glance(self, now: float) -> None:
        if now >= self._next_glance:
            self._next_glance = now + GLANCE_EVERY
            self.look()

    def look(self) -> None:
        """Poll: move the bytes that can be moved without waiting."""
        with self.engine.lock:
            if self._driver is None and not self.engine.closed:
                self._turn(0.0)

    @override
    def check_peers(self) -> None:
        self.look()
        self.heartbeat.look()

    @override
    def silent(self) -> Collection[int]:
        return self.heartbeat.silent()

    @override
    def watch(self) -> None:
        # Wake a thread that sleeps without being parked, so that it polls the step and parks.
        domain, driver = self.domain, self._driver
        if domain is None or driver is None or driver == threading.get_ident():
            return
        if not domain.is_parked:
            self.reactor.wake()

    def drive(self, over: Callable[[], bool], deadline: float, *, spin: float = 0.0) -> None:
        """Run the reactor until `over()`, or the deadline has passed: one turn at least. Lock held.

        So a call that is repeated makes progress, however short its timeout.
        """
        self._driver = threading.get_ident()
        remaining = math.inf
        try:
            while remaining > 0 and not over() and not self.engine.closed:
                remaining = deadline - self.engine.now()
                self._turn(max(remaining, 0.0), spin)
        finally:
            self._driver = None
            self._condition.notify_all()
            if min(self._background.values(), default=math.inf) < self._thread_looks_at:
                self._thread_may_go_on.notify()  # or it would look too late

    def _turn(self, seconds: float, spin: float = 0.0) -> None:
        """Take one turn: park, wait for sockets and wakeups, then handle the ready ones."""
        engine, domain = self.engine, self.domain
        if domain is not None and (engine.polled or domain.stalled):
            domain.park()
            domain.resume_stalled()
        if engine.polled:
            engine.look()
            if not all(step.wakes for step in engine.polled.values()):
                seconds = min(seconds, self._pause())
        if engine.ready:
            seconds = 0.0
        try:
            self.reactor.turn(seconds, engine.lock, spin)
        finally:
            if domain is not None:
                domain.unpark()
        if engine.closed:
            return
        if domain is not None:
            domain.resume_stalled()
        if engine.polled:
            engine.look()
        if engine.ready:
            self._looks = 0
            engine.run_ready()

    def _pause(self) -> float:
        """Return the seconds of sleep before the next look at a step that does not wake this rank.

        0 at first, since most waits are shorter than the shortest sleep.
        """
        self._looks += 1
        if self._looks <= LOOKS:
            os.sched_yield()
            return 0.0
        return min(SHORTEST_PAUSE * 2.0 ** min(self._looks - LOOKS, 16), LONGEST_PAUSE)

    @override
    def background(self, work: Work[Any], *, patience: float) -> None:
        with self.engine.lock:
            if work.over:
                return
            begins = self._background[work] = work.call.started + patience
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_background,
                    name=f"phalanx rank {self.engine.rank}",
                    daemon=True,
                )
                self._thread.start()
            if self._driver is not None and work.timeout < 4 * self.expiry_check:
                self.reactor.wake()  # or its deadline might pass unchecked
            if begins < self._thread_looks_at:
                self._thread_may_go_on.notify()

    def _run_background(self) -> None:
        engine, soon = self.engine, 0.0
        try:
            while not engine.closed:
                with engine.lock:
                    soon = self._move(soon)
                engine.run_callbacks()
        except Exception as error:
            # A bug: all groups fail, so that no thread waits for this one.
            with engine.lock:
                engine.fail_all(f"rank {engine.rank} stopped moving bytes: {error!r}")
            raise

    def _move(self, soon: float) -> float:
        """Move works nobody waits for, or sleep `soon` seconds at most; return the next `soon`.

        A work is left to other threads while it is young.
        """
        engine, now = self.engine, self.engine.now()
        seconds = soon if self._background else math.inf
        young = min(self._background.values(), default=math.inf) - now
        if self._background and self._driver is None and young <= 0:
            self.drive(lambda: not self._background, now + soon)
        elif not engine.callbacks and not engine.closed:
            if young > 0:
                seconds = min(seconds, young)
            self._thread_looks_at = now + seconds
            self._thread_may_go_on.wait(seconds if seconds < math.inf else None)
            self._thread_looks_at = 0.0
        self.heartbeat.attend()
        soon = self.expiry_check
        for work in list(self._background):
            soon = min(soon, max(0.0, work.attend()))
        if engine.ready:  # of what `attend` has ended; a look at steps would move young works
            engine.run_ready()
        return soon

    @override
    def wake(self, work: Work[Any]) -> None:
        self._background.pop(work, None)
        self._condition.notify_all()
        if self.engine.callbacks:  # of this work: perhaps no other thread waits, to call them
            self._thread_may_go_on.notify()

    @override
    def every(self, seconds: float, callback: Callable[[], object]) -> None:
        def call() -> None:
            callback()
            self.reactor.call_later(seconds, call)

        with self.engine.lock:
            self.reactor.call_later(seconds, call)

    # The end --------------------------------------------------------------------------------

    def say_goodbye(self, seconds: float) -> None:
        """Send LEAVE to every peer, and wait until all sent bytes have left. Lock held."""
        if self.wide is not None:
            self.wide.take_leave()
        for connection in list(self.mesh.connections.values()):
            if not connection.given_up:
                connection.send_control(Kind.LEAVE)
        if self._take_over():
            self.drive(self.mesh.all_sent, self.engine.now() + seconds)

    def _take_over(self) -> bool:
        """Wait until no other thread drives; False if this thread does already. Lock held."""
        while self._driver is not None:
            if self._driver == threading.get_ident():
                return False
            self.reactor.wake()
            self._condition.wait(self.expiry_check)
        return True

    def shut(self) -> None:
        if self.engine.closed:
            return
        self.engine.closed = True
        self.mesh.close()
        self._condition.notify_all()
        self._thread_may_go_on.notify_all()
        if self._take_over():
            self.reactor.close()
            if self.domain is not None:
                self.domain.close()
                self.domain = self.mesh.domain = None  # its memory is free with the last tensor
        thread = self._thread
        self.engine.lock.release()
        try:
            self.heartbeat.end()
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        finally:
            self.engine.lock.acquire()


def _step_of(until: Wait) -> Step | None:
    """Return the step inside which a thread may wait: an epoch, or a library's collective."""
    step = until.group.head_of_queue(until).step if isinstance(until, Work) else None
    return step if isinstance(step, Step) else None
