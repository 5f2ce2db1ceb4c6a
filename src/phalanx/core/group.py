"""A group: its ranks, their works, and its failure.

It is known by its parent, its members and the number of such groups before it, so that its members
can make it without a message. Its collectives run one after the other, in the order in which they
were issued; its messages run beside them; other groups know nothing of it.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.core.call import Call, Members
from phalanx.core.checker import Checker
from phalanx.core.engine import Engine
from phalanx.core.failure import Failure, closed_error, error_for
from phalanx.core.posted import PostedRound, W
from phalanx.core.shared_group import SharedGroup
from phalanx.core.steps import Program, Round
from phalanx.errors import (
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
)
from phalanx.wire.control import Ask

if TYPE_CHECKING:
    from phalanx.core.work import Work

log = logging.getLogger("phalanx")


class Spin(NamedTuple):
    """Seconds that a call looks at a step at most, with the lock held, until it is complete."""

    first: float
    later: float


BLOCKING = Spin(1.0, 1.0)
ASYNCHRONOUS = Spin(20e-6, 0.0)  # because a small collective finishes sooner than a thread switch


class Group(Members):
    """One rank's view of one group: its works, and its failure.

    parent     the group that it was made of
    checker    whether its members do the same things in the same order
    left       members, as global ranks, that have closed the group
    finished   the number of its collectives that are over on this rank
    shared     memory that members on this rank's host share
    """

    def __init__(
        self, engine: Engine, ident: int, ranks: tuple[int, ...], parent: Group | None = None
    ) -> None:
        super().__init__(ident, ranks, engine.rank)
        self.engine = engine
        self.parent = parent
        self.failure: Failure | None = None
        self._unraised = False  # whether no call has raised the failure yet
        self._issued_before = 0  # how many collectives when it failed
        self.closed = False
        self.left: set[int] = set()
        self.finished = 0
        self.seconds_waiting = 0.0
        self.checker = Checker(self, engine.now, self._ask, self.fail, strict=engine.strict)
        self.shared: SharedGroup | None = None
        self.bound: list[Group] = []  # which break when this one does
        self._queue: deque[Work[Any]] = deque()
        self._messages: set[Work[Any]] = set()
        self._children: Counter[tuple[int, ...]] = Counter()
        self._made: weakref.WeakSet[Group] = weakref.WeakSet()
        self._numbers: Counter[tuple[str, int]] = Counter()
        engine.add_group(self)
        self.shared = engine.transport.shared(self)

    def child(self, ranks: tuple[int, ...]) -> Group:
        """Return a new group of some members, known by them and the number of such before it."""
        earlier = self._children[ranks]
        self._children[ranks] += 1
        content = struct.pack(f"<QI{len(ranks)}I", self.id, earlier, *ranks)
        ident = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        group = Group(self.engine, ident, ranks, self)
        self._made.add(group)
        if self.closed:
            group.close()
        return group

    def next_message(self, direction: str, peer: int) -> int:
        """Return the number of the next message to or from this peer."""
        key = (direction, peer)
        self._numbers[key] += 1
        return self._numbers[key] - 1

    def _ask(self, peer: int, ask: Ask) -> None:
        self.engine.transport.control(peer, self.id, ask)

    def others(self) -> list[int]:
        """Return the other members, by their ranks here, that have not left."""
        left = self.left | self.engine.left
        return [
            local
            for local, rank in enumerate(self.ranks)
            if local != self.rank and rank not in left
        ]

    def was_blocked(self, seconds: float) -> None:
        """Add the seconds that a call of this group has blocked."""
        group: Group | None = self
        while group is not None:
            group.seconds_waiting += seconds
            group = group.parent

    # Works ----------------------------------------------------------------------------------

    def issue(self, work: Work[Any]) -> None:
        """Begin a work here and now, or put it behind the collectives that were issued before.

        An interrupt that comes meanwhile ends it. Lock held.
        """
        if self.failure is not None or self.closed or self.engine.closed:
            self._refuse(work)
        try:
            if not work.is_collective:
                self._messages.add(work)
                work.advance()
            else:
                self._queue.append(work)
                if self.checker.early_asks:
                    self.checker.compare_early(work.call)
                if self._queue and self._queue[0] is work:
                    work.advance()
            engine = self.engine
            if engine.ready or engine.polled:
                engine.run_ready()
            if engine.trace is not None and not work.over:
                engine.trace.issued(work, engine.now())
        except Exception:
            raise
        except BaseException as interruption:
            self.abandon(work, interruption)
            raise

    def interrupted(self, error: BaseException, before: int) -> None:
        """Handle an interrupt of the caller on its way to `issue` a collective, or in it.

        If that has a number, the other ranks wait for this one's part, which will not come: then
        the group is broken. `before` is the count of numbers before the call. Lock held.
        """
        checker = self.checker
        call, step = checker.calls[-1] if checker.calls else None, None
        if call is not None:
            step, call.step = call.step, None
        if isinstance(error, Exception) or self.failure is not None:
            return
        if call is None or call.sequence != before or call.ended:
            return
        if checker.issued == before:  # it has none yet
            checker.calls.pop()
            return
        if any(work.call is call for work in self._queue):
            return
        if self.shared is not None:
            self.shared.give_up()
        if step is not None:
            step.cancel()
        lost = self._given_up(call, error)
        self.fail(Failure(type(lost), self.here, self.here, str(lost), call.describe(), before))

    def under_way(self) -> list[Work[Any]]:
        """Return all works that have begun and not ended; collectives first, in their order."""
        return [*self._queue, *self._messages]

    def head_of_queue(self, wait: W) -> Work[Any] | W:
        """Return the wait that has to end before this one: itself, unless it is queued."""
        return self._queue[0] if wait.is_collective and self._queue else wait

    def run_inline(
        self, call: Call, steps: Iterator[Program], spin: Spin
    ) -> Iterator[Program] | None:
        """Carry out a new collective's steps in the thread that calls, if nothing is in the way.

        small, in shared memory    epoch                complete here: neither queue nor `Work`
        large, in shared memory    epoch  epoch ...     waited for, until one takes too long
        by messages                round                all of it is left

        Return the steps that are left, for a `Work`; the first, `call.step`, has begun. None if all
        are complete: the call is over. An error is left, too, for the work that fails with it. Lock
        held.
        """
        engine, checker = self.engine, self.checker
        queued, ended = self._queue, self.failure or self.closed or engine.closed
        if queued or ended or engine.trace or checker.early_asks or checker.desync:
            return steps
        counters, seconds = engine.counters, spin.first
        try:
            for step in steps:
                if isinstance(step, Round):
                    call.step = None
                    return chain((step,), steps)
                call.step = step
                step.begin(call)
                if counters is None:
                    if not step.ready(spin=seconds):
                        return chain((step,), steps)
                elif not counters.ready(step, seconds):
                    return chain((step,), steps)
                seconds = spin.later
        except BaseException as error:
            return _raising(error)
        call.step = None
        call.ended = engine.now()
        self.finished = call.sequence + 1
        engine.history.calls.append(call)
        if counters is not None:
            counters.ended(call)
        return None

    def work_ended(self, work: Work[Any]) -> None:
        """End a work: the next one in the queue may begin."""
        call, engine = work.call, self.engine
        call.failed = work.error is not None
        if work.is_collective:
            queue = self._queue
            if not call.failed:
                self.finished = call.sequence + 1
            if queue and queue[0] is work:
                queue.popleft()
                if queue:
                    engine.ready.append(queue[0])
            elif work in queue:  # not if it was interrupted before it came there
                queue.remove(work)
        else:
            self._messages.discard(work)
        call.ended = engine.now()
        engine.history.calls.append(call)
        engine.polled.pop(work, None)
        if engine.watchdog.queries:
            engine.watchdog.forget(work)
        if engine.counters is not None:
            engine.counters.ended(call)
        if engine.trace is not None:
            engine.trace.ended(work, engine.watchdog.awaited_since(work))
        engine.transport.wake(work)

    def work_failed(self, work: Work[Any], error: Exception) -> None:
        """Fail a work that cannot be completed; if it is a collective, break the group."""
        if work.over:
            return
        if not work.is_collective:
            if isinstance(error, CollectiveTimeoutError) and self._has_gone(work):
                self.engine.run_ready()
            else:
                work.fail(error)
            return
        kind: type[DistributedError] = PeerLostError
        culprit = self.rank
        reason = f"rank {self.name} failed in {work.describe()}: {error!r}"
        if isinstance(error, DistributedError):
            kind, reason = type(error), str(error)
            culprit = self.rank if error.peer is None else error.peer
        failure = Failure(
            kind,
            self.ranks[culprit],
            self.engine.rank,
            reason,
            work.describe(),
            work.sequence,
        )
        self._give_up()
        work.fail(error)
        self.fail(failure)

    def _has_gone(self, work: Work[Any]) -> bool:
        """Return whether a message that timed out arrives all the same: do not send it again."""
        step = work.step
        if not isinstance(step, PostedRound) or not all(part.done for part in step.receives):
            return False
        return all(send.done or self.engine.transport.finish_send(send) for send in step.sends)

    def abandon(self, work: Work[Any], why: str | BaseException) -> None:
        """Give a work up, for the caller's reason or interrupt."""
        if work.over:
            if work in self._queue or work in self._messages:  # interrupted at its very end
                self.work_ended(work)
            return
        self.work_failed(work, self._given_up(work.call, why))

    def _given_up(self, call: Call, why: str | BaseException) -> DistributedError:
        """Return the error on all ranks; a rank that a signal interrupted is lost to the others."""
        interrupted = isinstance(why, BaseException)
        reason = f"interrupted by {type(why).__name__}" if interrupted else why
        return (PeerLostError if interrupted else MisuseError)(
            f"rank {self.name}: {call.describe()} was given up: {reason}",
            rank=self.rank,
            peer=self.rank if interrupted else None,
            op=call.name,
            sequence=call.sequence,
        )

    def break_alone(self, work: Work[Any], error: DistributedError) -> None:
        """End a work and break the group without telling: the others know it, too."""
        self._give_up()
        work.fail(error)
        culprit = self.ranks[error.peer or 0]
        self.fail(Failure(type(error), culprit, self.engine.rank, str(error)), tell=False)

    def attend(self, work: Work[Any]) -> float:
        """Do a work's due actions; return the seconds to the next.

        A collective that waits asks whether the others are in it, too. Past its deadline it fails,
        and so do the works queued behind it.
        """
        now = self.engine.now()
        due = self.checker.attend(now)
        head = self._queue[0] if work.is_collective and self._queue else work
        first = min(work, head, key=lambda each: each.deadline)
        due = min(due, self.engine.watchdog.check_deadline(first, now))
        due = min(due, self.engine.watchdog.check_patience(work, now))
        if head.is_collective and not head.over:
            if now >= head.ask_at:
                head.ask_at = now + self.engine.ask_every
                self.checker.ask(head.call, head.waits_for())
            due = min(due, head.ask_at)
        return 0.0 if work.over else due - now

    # Failure --------------------------------------------------------------------------------

    def fail(self, failure: Failure, *, tell: bool = True) -> None:
        """Break the group: all works under way in it end with this failure."""
        if self.failure is not None:
            return
        self.failure = failure
        self._issued_before = self.checker.issued
        self.checker.broken = True
        self._give_up()
        self._unraised = not self.under_way()
        for work in self.under_way():
            work.fail(self._error_for(failure, work.call))
        self.engine.matching.forget_group(self.id)
        if tell:
            self.engine.transport.tell_members(self, failure.notice())
            for other in self.bound:
                if not other.closed:
                    other.fail(failure)

    def member_left(self, rank: int) -> None:
        """Note that a member has closed the group in good order: only waits for it fail."""
        self.left.add(rank)
        if self.checker.desync is not None:
            self.fail(self.checker.desync.failure)  # it will not answer
        failure = Failure(PeerLostError, rank, rank, f"rank {self.name_of_global(rank)} left")
        for work in self._messages | set(list(self._queue)[:1]):
            if work.step is not None and work.step.needs(rank):
                self.work_failed(work, self._error_for(failure, work.call))

    def close(self) -> None:
        """End its works, and the groups made of it; later calls are a `MisuseError`."""
        if self.closed:
            return
        self.closed = True
        self._log_unnoticed_desync()
        for child in self._made:
            child.close()
        self._give_up()
        for work in self.under_way():
            work.fail(closed_error(work.call, self))
        self.engine.matching.forget_group(self.id)
        self.engine.groups.pop(self.id, None)
        if self.shared is not None:
            self.shared.close()
            self.shared = None

    def _give_up(self) -> None:
        """Tell peers that may still read the caller's memory, before the caller has it back."""
        if self.shared is not None and self._queue:
            self.shared.give_up()

    def _log_unnoticed_desync(self) -> None:
        """Log a disagreement that no call has raised: there will be no further call."""
        desync = self.checker.desync
        if self.failure is None and desync is not None:
            self.fail(desync.failure)
        unraised = all(group._unraised for group in (self, *self.bound))
        if self.failure is not None and unraised and self.failure.error is DesyncError:
            self._unraised = False
            log.warning(
                "rank %d closes%s without having noticed: %s",
                self.rank,
                self.suffix,
                self.failure.reason,
            )

    def _error_for(self, failure: Failure, call: Call, *, later: bool = False) -> DistributedError:
        desync = self.checker.desync
        return error_for(
            failure,
            call,
            self,
            now=self.engine.now(),
            description_of=self.checker.description_of,
            diverged=desync.failure.culprit if desync is not None else None,
            later=later,
        )

    def _refuse(self, work: Work[Any]) -> None:
        """Raise the first failure of the group, or that it is closed."""
        call, failure = work.call, self.failure
        if work.step is not None:
            work.step.cancel()
        # The group may have failed while the caller did the first steps of this one.
        later = not work.is_collective or call.sequence >= self._issued_before
        if work.is_collective and later:
            self.checker.calls.pop()
        if self.closed or self.engine.closed or failure is None:
            raise closed_error(call, self)
        self._unraised = False
        error = self._error_for(failure, call, later=later)
        self.engine.history.note_on(error)
        try:
            raise error
        finally:
            del error  # a cycle, by its traceback, with the memory of the call


def _raising(error: BaseException) -> Iterator[Program]:
    """Return steps that end in an error."""

    def fail() -> Program:
        raise error

    return iter(fail, None)
