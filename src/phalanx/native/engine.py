"""The engine over another library: its collectives where it has them, else its messages.

    natives   collectives that the library carries out whole: one step, one handle
    courier   all else: messages, the rounds of the collectives that it has not, and what ranks
              tell each other about groups, so that failures and waits are explained as on any
              backend

Whoever waits looks after everything. Only while an asynchronous operation is outstanding is there
a thread that does so in the background.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import monotonic

from typing_extensions import override

from phalanx.core.backend import Backend, CloseAtExit
from phalanx.core.engine import Engine
from phalanx.core.failure import Failure
from phalanx.core.group import WORLD_ID, Group
from phalanx.core.steps import Call, Native, PostedSend, Step, Ticket
from phalanx.core.work import Operation, Wait
from phalanx.errors import PeerLostError, UnsupportedOperationError
from phalanx.native.base import Begun, CallTicket, Library
from phalanx.native.collectives import Natives
from phalanx.native.messages import Courier
from phalanx.wire.control import Answer, Ask, encode
from phalanx.wire.frame import Kind

SOON = 0.003  # seconds that a collective is waited for before an operation is made of it
SLICE = 0.02  # seconds that a collective is waited for before messages are looked after again
LOOKS = 200  # at what may be over, one after the other, before the first pause
SHORTEST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3  # seconds between questions, if it does not call back


class LibraryEngine(Engine):
    """Moves the bytes of one rank.

    collectives   the library's group for them, of all ranks
    messages      its group for messages, which may be the same; None: there are only collectives
    """

    def __init__(self, collectives: Library, messages: Library | None) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._condition = threading.Condition(self.lock)
        self._background = Background(self, self._condition)
        self._pause = SHORTEST_PAUSE
        self._look_at = 0.0  # when a call that may end without waiting looks after all else
        self.natives = Natives(self, collectives)
        self.courier = Courier(self, messages)
        if messages is not None:
            messages.news = self.news
            with self.lock:
                self.courier.begin()

    @override
    def native_for(self, group: Group) -> Native | None:
        return self.natives.of(group)

    # What an engine does --------------------------------------------------------------------

    @override
    def issue(self, operation: Operation) -> None:
        if self.courier.library is None:
            self._check_native(operation)
        super().issue(operation)
        if self.natives.can.ordered and operation.is_collective:
            with self.lock:
                self._begin_early(operation)

    def _check_native(self, operation: Operation) -> None:
        first = operation.first_step()
        if first is not None and type(first) not in (Call, Begun):
            raise UnsupportedOperationError(
                f"rank {operation.group.rank}: {operation.describe()} needs messages, and this "
                "library moves none between CPU memories; use a backend that does for it",
                rank=operation.group.rank,
                op=operation.name,
                sequence=operation.sequence,
            )

    def _begin_early(self, operation: Operation) -> None:
        """Where the library keeps the order, one need not end before the next one begins."""
        if operation.ticket is not None or operation.done:
            return
        ahead = [other for other in operation.group.queued() if other is not operation]
        if all(type(other.ticket) is CallTicket for other in ahead):
            operation.advance()

    @override
    def post(self, operation: Operation, step: Step) -> Ticket:
        if type(step) is Call:
            return self.natives.begin(operation, step)
        if type(step) is Begun:
            return self.natives.go_on(operation, step)
        return super().post(operation, step)

    @override
    def glance(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + SLICE
            self.look_after_all()

    @override
    def begin_call(self, group: Group, call: Call, seconds: float) -> Step | None:
        return self.natives.begin_at_once(group, call, min(seconds, SOON))

    @override
    def run_ready(self) -> None:
        if self.natives.can.ordered:
            # One may be at the head of its group now that was begun before it was that.
            begun = [
                op for op in self.ready if type(op.ticket) is CallTicket and not op.ticket.done
            ]
            for operation in begun:
                self.ready.remove(operation)
        if self.ready:
            super().run_ready()

    @override
    def withdraw(self, ticket: Ticket) -> None:
        if type(ticket) is CallTicket:
            self.natives.give_up(ticket)
        super().withdraw(ticket)

    @override
    def transmit(self, send: PostedSend) -> None:
        self.courier.send(send)

    @override
    def reach(self, peer: int) -> None:
        self.courier.resume(peer)

    @override
    def retract(self, send: PostedSend) -> None:
        self.courier.retract(send)

    @override
    def settle(self, send: PostedSend) -> bool:
        return self.courier.settle(send)

    @override
    def tell(self, group: Group, failure: Failure) -> None:
        self._send_to_members(group, Kind.FAILURE, encode(failure.notice()))

    @override
    def announce_leaving(self, group: Group) -> None:
        self.natives.close_group(group)
        self._send_to_members(group, Kind.LEAVE_GROUP)

    def _send_to_members(self, group: Group, kind: Kind, payload: bytes = b"") -> None:
        for rank in group.ranks:
            self.courier.send_control(rank, kind, payload, group.id)

    @override
    def ask(self, peer: int, group: int, ask: Ask) -> None:
        self.courier.send_control(peer, Kind.ASK, encode(ask), group)

    @override
    def answer(self, peer: int, answer: Answer) -> None:
        self.courier.send_control(peer, Kind.ANSWER, encode(answer))

    @override
    def has_left(self, peer: int) -> bool:
        return peer in self.courier.left

    # What the courier hears -----------------------------------------------------------------

    def news(self) -> None:
        """The library says that a message is over. Called by any thread, which sees to it."""
        with self.lock:
            if not self.closed:
                self.guarded(self.look_after_all)
                self._condition.notify_all()

    @override
    def peer_lost(self, peer: int, reason: str) -> None:
        self.natives.poll()  # what is complete has not failed
        super().peer_lost(peer, reason)

    def member_leaves(self, group_id: int, peer: int) -> None:
        """A peer has closed a group; perhaps after a collective that still goes on here."""
        group = self.groups.get(group_id)
        if group is None:
            self.member_left(group_id, peer)
        else:
            self.natives.when_over(group, lambda: group.member_left(peer))

    def peer_leaves(self, peer: int, let_go: Callable[[], None]) -> None:
        """A peer closes everything, in good order; `let_go` when no collective needs it here."""
        groups = [group for group in self.groups.values() if peer in group.to_local]
        waiting = Counter(group.id for group in groups)

        def over(group: Group) -> None:
            group.member_left(peer)
            del waiting[group.id]
            if not waiting:
                let_go()

        for group in groups:
            self.natives.when_over(group, partial(over, group))
        if not groups:
            let_go()

    # Driving --------------------------------------------------------------------------------

    @override
    def progress(self, until: Wait) -> None:
        with self.lock:
            # Most collectives are over before anything is due.
            left = min(until.deadline - monotonic(), SLICE)
            while not until.done:
                self.rest(until, left)
                if not until.done:
                    self.look_after_all()
                    left = 0.0 if until.done else until.attend()
                    self.run_ready()

    @override
    def look_at(self, operation: Operation) -> None:
        with self.lock:
            self.look_after_all()
            if not operation.done:
                operation.group.attend(operation)
                self.run_ready()

    def look_after_all(self) -> bool:
        """See to everything that is over; whether anything was."""
        any_over = self.natives.poll()
        self.run_ready()  # before it is heard that somebody has left: what is complete is complete
        while self.courier.poll():
            any_over = True
        self.run_ready()
        return any_over

    def rest(self, until: Wait, seconds: float, *, streams: bool = True) -> None:
        """Sleep until something may have happened, or for so long. Lock held, but let go."""
        if seconds <= 0:
            return
        ticket = None
        if isinstance(until, Operation):  # of several, none's handle is waited for
            ticket = self.natives.waited_for(until, streams=streams)
        if ticket is not None:
            self._wait_for(ticket, min(seconds, SLICE))
        elif self.courier.calls_back:
            # Other operations' collectives do not call back.
            self._condition.wait(min(seconds, SLICE if self.natives.busy else LOOK))
        elif self._comes_soon(until, LOOKS if streams else 0):
            self._pause = SHORTEST_PAUSE
        else:
            self._condition.wait(min(seconds, self._pause))
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _comes_soon(self, until: Wait, looks: int) -> bool:
        """Whether anything is over within so many looks: a sleep is longer than most waits."""
        while not self.look_after_all():
            if looks == 0 or until.done or self.closed:
                return False
            looks -= 1
            self.lock.release()
            os.sched_yield()
            self.lock.acquire()
        return True

    def _wait_for(self, ticket: CallTicket, seconds: float) -> None:
        handle, over, failure = ticket.handle, False, None
        assert handle is not None
        ticket.busy = True
        self.lock.release()
        try:
            over = handle.wait(seconds)
        except Exception as error:  # whatever the library raises
            failure = error
        finally:
            self.lock.acquire()
            ticket.busy = False
        if failure is not None:
            self.natives.failed(ticket, failure)
        elif over:
            self.natives.over(ticket)
        self.run_ready()

    @override
    def in_background(self, operation: Operation) -> None:
        with self.lock:
            if not operation.done and not self.natives.goes_on_by_itself(operation):
                self._background.add(operation)
                self._condition.notify_all()

    def guarded(self, task: Callable[[], object]) -> None:
        """In a thread of ours: whoever waits must hear of a fault that ends it. Lock held."""
        try:
            task()
        except Exception as error:
            reason = f"rank {self.rank} stopped moving bytes: {error!r}"
            for group in list(self.groups.values()):
                group.fail(Failure(PeerLostError, self.rank, self.rank, reason))
            self.run_ready()
            raise

    @override
    def operation_done(self, operation: Operation) -> None:
        self._background.discard(operation)
        self._condition.notify_all()

    # The end --------------------------------------------------------------------------------

    def say_goodbye(self, seconds: float) -> None:
        """Tell every peer, and see to it that nobody needs anything of this rank. Lock held."""
        self.courier.send_control_to_all(Kind.LEAVE)
        self.wait_until_said(seconds)

    def wait_until_said(self, seconds: float) -> None:
        """See to it that words leave this process, for so many seconds at most. Lock held."""
        deadline = monotonic() + seconds
        # A peer whose library calls back lets go at once, whatever it is doing.
        while not self.courier.may_go(let_go=self.courier.calls_back) and monotonic() < deadline:
            self.look_after_all()
            self._condition.wait(LONGEST_PAUSE)

    def shut(self) -> None:
        """Close everything. Lock held."""
        if self.closed:
            return
        self.closed = True
        self._condition.notify_all()
        self.lock.release()  # which threads of the library's may wait for
        try:
            self._background.end()
            self.courier.close()
            self.natives.close()
        finally:
            self.lock.acquire()


# ------------------------------------------------------------------------------
# What goes on while nobody waits: a thread that looks after asynchronous operations.

LOOK = 0.25  # seconds between looks at the deadlines of operations nobody waits for


class Background:
    """The operations that nobody waits for, and the thread, once there has been one.

    Its methods are called with the engine's lock held, which is that of the condition.
    """

    def __init__(self, engine: LibraryEngine, condition: threading.Condition) -> None:
        self._engine = engine
        self._condition = condition
        self._operations: dict[Operation, None] = {}
        self._thread: threading.Thread | None = None

    def add(self, operation: Operation) -> None:
        """Look after this one, too."""
        self._operations[operation] = None
        if self._thread is None:
            name = f"phalanx rank {self._engine.rank}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def discard(self, operation: Operation) -> None:
        """It has ended."""
        self._operations.pop(operation, None)

    def end(self) -> None:
        """Wait for the thread, which ends when the engine is closed. Lock not held."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with self._engine.lock:
            self._engine.guarded(self._keep_moving)

    def _keep_moving(self) -> None:
        engine = self._engine
        while not engine.closed:
            if not self._operations:
                self._condition.wait()
                continue
            engine.look_after_all()
            soon = LOOK
            for operation in list(self._operations):
                soon = min(soon, max(0.0, operation.group.attend(operation)))
            engine.run_ready()
            if self._operations and not engine.closed:
                engine.rest(next(iter(self._operations)), soon, streams=False)


# ------------------------------------------------------------------------------
# `LibraryBackend`: what the backends over other libraries have in common.

FAREWELL = 5.0  # seconds that close() waits at most for what was sent to be gone


class LibraryBackend(Backend):
    """A backend over another library's groups of ranks.

    collectives   the library's group of all ranks, for its own collectives
    messages      for all else; None if there is none: then there is nothing else
    topology      for each rank the number of the host that it is on
    """

    def __init__(
        self,
        collectives: Library,
        messages: Library | None,
        topology: tuple[int, ...],
        *,
        timeout: float,
    ) -> None:
        engine = LibraryEngine(collectives, messages)
        group = Group(engine, WORLD_ID, tuple(range(engine.world_size)))
        super().__init__(engine, group, timeout=timeout)
        self._engine = engine
        self.topology = topology
        self.devices = collectives.can.devices | self.devices
        self._at_exit = CloseAtExit(self)
        os.register_at_fork(after_in_child=_CloseInChild(self))

    def close(self) -> None:
        """Leave: whoever waits for this rank gets a `PeerLostError` that says that it left.

        Waits until what was sent has been taken by the library, 5 seconds at most.
        """
        self._leave(farewell=FAREWELL)

    def abort(self) -> None:
        """Leave as if this rank had died: the groups that it is in are broken."""
        self._leave(farewell=0.0)

    def _leave(self, *, farewell: float) -> None:
        engine = self._engine
        with engine.lock:
            if engine.closed:
                return
            if farewell:
                engine.look_after_all()  # word of a failure may be waiting
            for group in list(engine.groups.values()):
                group.close()
            engine.run_ready()
            if farewell:
                engine.say_goodbye(farewell)
            engine.shut()
        self._at_exit.cancel()


class _CloseInChild:
    """Ends a backend in a child process that was forked, which has none of its threads."""

    def __init__(self, backend: LibraryBackend) -> None:
        self._backend = weakref.ref(backend)

    def __call__(self) -> None:
        backend = self._backend()
        if backend is not None:
            backend.group.closed = backend.engine.closed = True
