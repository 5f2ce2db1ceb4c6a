"""A group: which ranks, what they are doing, and whether they still can.

It is known by its parent, its members and how many of that kind came before, so that its members
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
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from phalanx.core.checker import ASK_EVERY, EMPTY_HASH, Checker, extend_hash
from phalanx.core.failure import Failure, closed_error, error_for
from phalanx.core.recorder import Record
from phalanx.core.watchdog import WaitForGraph, query_lead_time
from phalanx.errors import (
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
)

if TYPE_CHECKING:
    from phalanx.core.engine import Engine
    from phalanx.core.steps import SharedGroup
    from phalanx.core.work import Operation, Wait
if TYPE_CHECKING:
    W = TypeVar("W", bound=Wait)

log = logging.getLogger("phalanx")

WORLD_ID = 0


class Group:
    """One rank's view of one group.

    ranks      its members as ranks of the whole job; a member's place here is its rank in the group
    to_local   the other way round
    """

    def __init__(self, engine: Engine, ident: int, ranks: tuple[int, ...]) -> None:
        self.engine = engine
        self.id = ident
        self.ranks = ranks
        self.to_local = {rank: place for place, rank in enumerate(ranks)}
        self.rank = self.to_local[engine.rank]
        self.size = len(ranks)
        self.failure: Failure | None = None
        self._untold = False  # whether no call has raised the failure
        self.closed = False
        self.left: set[int] = set()  # members, as ranks of the job, that have closed the group
        self.suffix = "" if ident == WORLD_ID else f" in the group of ranks {list(ranks)}"
        self.finished = 0  # collectives of this group that are over on this rank, the last being
        self.checker = Checker(self)
        self.next_number = 0  # of the next collective
        self.rolling_hash = EMPTY_HASH  # of all that were issued
        self.shared: SharedGroup | None = None  # shared memory of the members on this host
        self._queue: deque[Operation] = deque()
        self._messages: set[Operation] = set()
        self._children: Counter[tuple[int, ...]] = Counter()
        self._made: weakref.WeakSet[Group] = weakref.WeakSet()
        self._numbers: Counter[tuple[str, int]] = Counter()
        engine.add_group(self)
        self.shared = engine.shared_group(self)

    def _child_id(self, ranks: tuple[int, ...]) -> int:
        """The identity of the next group of these members that is made from this one."""
        earlier = self._children[ranks]
        self._children[ranks] += 1
        content = struct.pack(f"<QI{len(ranks)}I", self.id, earlier, *ranks)
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")

    def child(self, ranks: tuple[int, ...]) -> Group:
        """A new group of some of the members."""
        group = Group(self.engine, self._child_id(ranks), ranks)
        self._made.add(group)
        if self.closed:
            group.close()
        return group

    def next_sequence(self, fingerprint: int = 0) -> int:
        """The number of the next collective of this group, now that it is known what it is."""
        self.rolling_hash = extend_hash(self.rolling_hash, fingerprint)
        self.next_number += 1
        return self.next_number - 1

    def next_message(self, direction: str, peer: int) -> int:
        """The number of the next message to or from this peer."""
        key = (direction, peer)
        self._numbers[key] += 1
        return self._numbers[key] - 1

    def name_of(self, local: int) -> str:
        """A member for a message: its rank here, and in the whole job where that differs."""
        whole = self.ranks[local]
        return str(local) if whole == local else f"{local} (rank {whole} of the job)"

    def others(self) -> list[int]:
        """The other members, by their ranks here, that have not left."""
        engine = self.engine
        return [
            local
            for local, whole in enumerate(self.ranks)
            if local != self.rank and whole not in self.left and not engine.has_left(whole)
        ]

    def name_of_global(self, rank: int) -> str:
        """The same for a rank of the job, which need not be a member."""
        local = self.to_local.get(rank)
        return f"{rank} of the job" if local is None else self.name_of(local)

    # Operations ---------------------------------------------------------------------------

    def issue(self, operation: Operation) -> None:
        """Begin an operation, or put it behind the collectives that were issued before."""
        self.check_usable(operation)
        if not operation.is_collective:
            self._messages.add(operation)
            operation.advance()
        else:
            self._queue.append(operation)
            self.checker.check(operation)
            if self._queue and self._queue[0] is operation:
                operation.advance()

    def queued(self) -> Iterator[Operation]:
        """The collectives that are under way, in their order."""
        return iter(self._queue)

    def under_way(self) -> list[Operation]:
        """Everything that has begun and not ended; the collectives first, in their order."""
        return [*self._queue, *self._messages]

    def head_of_queue(self, operation: W) -> Operation | W:
        """The operation that has to end before this one can: itself, if it is under way."""
        return self._queue[0] if operation.is_collective and self._queue else operation

    def may_finish(self, operation: Operation) -> bool:
        """Whether an operation that has all that it needs is complete: not while ranks disagree."""
        if not operation.is_collective:
            return True
        if self.checker.desync is not None:
            return False
        sender = self.engine.matching.unexpected_from(operation.channel)
        if sender is not None:
            self.checker.got_unexpected_message(operation.sequence, sender)
        return sender is None

    def operation_done(self, operation: Operation) -> None:
        """An operation has ended: the next one in the queue may begin."""
        record = Record.of(operation, monotonic())
        if operation.is_collective:
            was_head = self._queue[0] is operation
            self._queue.remove(operation)
            self.checker.ended(record)
            if operation.error is None:
                self.finished = operation.sequence + 1
            if was_head and self._queue:
                self.engine.ready.append(self._queue[0])
        else:
            self._messages.discard(operation)
        self.engine.operation_ended(operation, record)

    def operation_failed(self, operation: Operation, error: Exception) -> None:
        """An operation cannot be completed. If it is a collective, neither can the group."""
        if operation.done:
            return
        if not operation.is_collective:
            if isinstance(error, CollectiveTimeoutError) and self._has_gone(operation):
                self.engine.run_ready()
            else:
                operation.fail(error)
            return
        kind: type[DistributedError] = PeerLostError
        culprit = self.rank
        reason = f"rank {self.rank} failed in {operation.describe()}: {error!r}"
        if isinstance(error, DistributedError):
            kind, reason = type(error), str(error)
            culprit = self.rank if error.peer is None else error.peer
        failure = Failure(
            kind,
            self.ranks[culprit],
            self.engine.rank,
            reason,
            operation.describe(),
            operation.sequence,
        )
        self._give_up()
        operation.fail(error)
        self.fail(failure)

    def _has_gone(self, operation: Operation) -> bool:
        """Whether a message that timed out arrives all the same: resent, it would come twice."""
        ticket = operation.ticket
        if ticket is None or not all(posted.done for posted in ticket.receives):
            return False
        return all(send.done or self.engine.settle(send) for send in ticket.sends)

    def attend(self, operation: Operation) -> float:
        """See to what is due while an operation is under way; seconds until this is needed again.

        A collective that waits asks whether the others are in it, too. Past its deadline it fails,
        and what is queued behind it; shortly before, it asks who waits for whom.
        """
        now = monotonic()
        desync = self.checker.desync
        if desync is not None and now >= desync.deadline:
            self.fail(desync.failure)
        head = self.head_of_queue(operation)
        first = min(operation, head, key=lambda other: other.deadline)
        inquire_at = first.deadline - query_lead_time(first.timeout)
        if now >= inquire_at and first.wait_for is None and not first.done:
            first.wait_for = WaitForGraph(first)
            first.wait_for.begin()
        if now >= first.deadline and not first.done:
            assert first.wait_for is not None
            self.operation_failed(first, first.wait_for.verdict())
        if head.is_collective and now >= head.ask_at and not head.done:
            head.ask_at = now + ASK_EVERY
            self.checker.ask(head)
        due = first.deadline if first.wait_for is not None else inquire_at
        if head.is_collective:
            due = min(due, head.ask_at)
        if desync is not None:
            due = min(due, desync.deadline)
        return 0.0 if operation.done else due - now

    def abandon(self, operation: Operation, reason: str) -> None:
        """The caller was interrupted while it waited."""
        if operation.done:
            return
        error = MisuseError(
            f"rank {self.rank}: {operation.describe()} was given up: {reason}",
            rank=self.rank,
            op=operation.name,
            sequence=operation.sequence,
        )
        self.operation_failed(operation, error)

    def break_alone(self, operation: Operation, error: DistributedError) -> None:
        """End an operation and break the group without telling: the others know it, too."""
        self._give_up()
        operation.fail(error)
        culprit = self.ranks[error.peer or 0]
        self.fail(Failure(type(error), culprit, self.engine.rank, str(error)), tell=False)

    def is_free(self) -> bool:
        """Whether a collective may be done at once, by the caller itself: nothing is in the way."""
        return not (
            self._queue
            or self.failure
            or self.closed
            or self.engine.closed
            or self.checker.is_busy()
            or self.engine.trace
        )

    def was_done(self, record: Record) -> None:
        """A collective was begun and ended by the caller itself."""
        self.finished = record.sequence + 1
        self.checker.ended(record)
        self.engine.history.add(record)

    # Failure ------------------------------------------------------------------------------

    def fail(self, failure: Failure, *, tell: bool = True) -> None:
        """Break the group: whatever is under way in it ends with this failure."""
        if self.failure is not None:
            return
        self.failure = failure
        self._give_up()
        self._untold = not self.under_way()
        for operation in self.under_way():
            operation.fail(error_for(failure, operation))
        self.engine.matching.forget_group(self.id)
        if tell:
            self.engine.tell(self, failure)

    def member_left(self, rank: int) -> None:
        """A member has closed the group, in good order: only who waits for it cannot go on."""
        self.left.add(rank)
        if self.checker.desync is not None:
            self.fail(self.checker.desync.failure)  # nobody will say what it was doing
        failure = Failure(PeerLostError, rank, rank, f"rank {self.name_of_global(rank)} left")
        waiting = self._messages | set(list(self._queue)[:1])
        for operation in waiting:
            ticket = operation.ticket
            if ticket is not None and ticket.needs(rank):
                self.operation_failed(operation, error_for(failure, operation))

    def close(self) -> None:
        """End what is under way, and what was made of it; later calls are a `MisuseError`."""
        if self.closed:
            return
        self.closed = True
        self._tell_at_last()
        for child in self._made:
            child.close()
        self._give_up()
        for operation in self.under_way():
            operation.fail(closed_error(operation))
        self.engine.matching.forget_group(self.id)
        self.engine.groups.pop(self.id, None)
        if self.shared is not None:
            self.shared.close()

    def _give_up(self) -> None:
        """Before the caller has its memory back, those who may still read it know."""
        if self.shared is not None and self._queue:
            self.shared.give_up()

    def _tell_at_last(self) -> None:
        """A rank that makes no call any more hears of a disagreement here, in the log."""
        desync = self.checker.desync
        if self.failure is None and desync is not None:
            self.fail(desync.failure)
        if self.failure is not None and self._untold and self.failure.error is DesyncError:
            log.warning(
                "rank %d closes%s without having noticed: %s",
                self.rank,
                self.suffix,
                self.failure.reason,
            )

    def check_usable(self, operation: Operation) -> None:
        """Raise the first failure of the group, or that it is closed."""
        if self.closed or self.engine.closed:
            raise closed_error(operation)
        if self.failure is not None:
            self._untold = False
            error = error_for(self.failure, operation, later=True)
            self.engine.history.note_on(error)
            raise error
