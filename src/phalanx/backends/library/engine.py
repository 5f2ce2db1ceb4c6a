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
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import monotonic

from typing_extensions import override

from phalanx.backends.engine import (
    Engine,
    Failure,
    Group,
    Operation,
    PostedSend,
    Step,
    Ticket,
    Waited,
)
from phalanx.backends.library.background import LOOK, Background
from phalanx.backends.library.call_ticket import Begun, CallTicket
from phalanx.backends.library.courier import Courier
from phalanx.backends.library.library import Library
from phalanx.backends.library.natives import Natives
from phalanx.backends.native import Call, Native
from phalanx.errors import PeerLostError, UnsupportedOperationError
from phalanx.wire.frame import Kind
from phalanx.wire.messages import Answer, Ask, encode

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
    def tell_leaving(self, group: Group) -> None:
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
    def progress(self, until: Waited) -> None:
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

    def rest(self, until: Waited, seconds: float, *, streams: bool = True) -> None:
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

    def _comes_soon(self, until: Waited, looks: int) -> bool:
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
