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
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.core.checker import EMPTY_HASH, Checker, extend_hash
from phalanx.core.failure import Failure, closed_error, error_for
from phalanx.core.steps import PostedRound
from phalanx.core.watchdog import check_deadline
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
    from phalanx.core.work import Call, Wait, Work

    W = TypeVar("W", bound=Wait)

log = logging.getLogger("phalanx")

WORLD_ID = 0


class Group:
    """One rank's view of one group.

    ranks      its members as global ranks; a member's place here is its rank in the group
    to_local   the other way round
    parent     the group that it was made of
    finished   the number of its collectives that are over on this rank
    shared     memory that members on this rank's host share
    """

    def __init__(
        self, engine: Engine, ident: int, ranks: tuple[int, ...], parent: Group | None = None
    ) -> None:
        self.engine = engine
        self.id = ident
        self.ranks = ranks
        self.parent = parent
        self.to_local = {rank: place for place, rank in enumerate(ranks)}
        self.rank = self.to_local[engine.rank]
        self.size = len(ranks)
        self.suffix = "" if ident == WORLD_ID else f" in the group of ranks {list(ranks)}"
        self.failure: Failure | None = None
        self._untold = False  # whether no call has raised the failure
        self.closed = False
        self.left: set[int] = set()  # members, as global ranks, that have closed the group
        self.finished = 0
        self.issued = 0
        self.rolling_hash = EMPTY_HASH  # of all collectives that were issued
        self.seconds_waiting = 0.0
        self.checker = Checker(self)
        self.shared: SharedGroup | None = None
        self._queue: deque[Work[Any]] = deque()
        self._messages: set[Work[Any]] = set()
        self._children: Counter[tuple[int, ...]] = Counter()
        self._made: weakref.WeakSet[Group] = weakref.WeakSet()
        self._numbers: Counter[tuple[str, int]] = Counter()
        engine.add_group(self)
        self.shared = engine.transport.shared(self)

    def child(self, ranks: tuple[int, ...]) -> Group:
        """A new group of some of the members, known by them and how many there were before."""
        earlier = self._children[ranks]
        self._children[ranks] += 1
        content = struct.pack(f"<QI{len(ranks)}I", self.id, earlier, *ranks)
        ident = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        group = Group(self.engine, ident, ranks, self)
        self._made.add(group)
        if self.closed:
            group.close()
        return group

    def next_collective(self, fingerprint: int) -> int:
        """The number of the next collective of this group, now that it is known what it is."""
        self.rolling_hash = extend_hash(self.rolling_hash, fingerprint)
        self.issued += 1
        return self.issued - 1

    def next_message(self, direction: str, peer: int) -> int:
        """The number of the next message to or from this peer."""
        key = (direction, peer)
        self._numbers[key] += 1
        return self._numbers[key] - 1

    def name_of(self, local: int) -> str:
        """A member for a message: its rank here, and in the whole job where that differs."""
        whole = self.ranks[local]
        return str(local) if whole == local else f"{local} (rank {whole} of the job)"

    def name_of_global(self, rank: int) -> str:
        """The same for a global rank, which need not be a member."""
        local = self.to_local.get(rank)
        return f"{rank} of the job" if local is None else self.name_of(local)

    def others(self) -> list[int]:
        """The other members, by their ranks here, that have not left."""
        has_left = self.engine.transport.has_left
        return [
            local
            for local, whole in enumerate(self.ranks)
            if local != self.rank and whole not in self.left and not has_left(whole)
        ]

    def was_blocked(self, seconds: float) -> None:
        """A call of this group has blocked for so long."""
        group: Group | None = self
        while group is not None:
            group.seconds_waiting += seconds
            group = group.parent

    # Works ----------------------------------------------------------------------------------

    def issue(self, work: Work[Any]) -> None:
        """Begin a work, or put it behind the collectives that were issued before."""
        self.check_usable(work.call)
        if not work.is_collective:
            self._messages.add(work)
            work.advance()
        else:
            self._queue.append(work)
            self.checker.begins(work)
            if self._queue and self._queue[0] is work:
                work.advance()

    def queued(self) -> Iterator[Work[Any]]:
        """The collectives that are under way, in their order."""
        return iter(self._queue)

    def under_way(self) -> list[Work[Any]]:
        """Everything that has begun and not ended; the collectives first, in their order."""
        return [*self._queue, *self._messages]

    def head_of_queue(self, wait: W) -> Work[Any] | W:
        """What has to end before this wait can: the wait itself, unless it is queued."""
        return self._queue[0] if wait.is_collective and self._queue else wait

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

    def may_finish(self, work: Work[Any]) -> bool:
        """Whether a work whose steps are done is complete: not while ranks disagree."""
        if not work.is_collective:
            return True
        if self.checker.desync is not None:
            return False
        sender = self.engine.matching.unexpected_from(work.channel)
        if sender is not None:
            self.checker.got_unexpected_message(work.sequence, sender)
        return sender is None

    def call_ended(self, call: Call) -> None:
        """A collective is over, well or not."""
        call.ended = self.engine.now()
        if not call.failed:
            self.finished = call.sequence + 1
        self.checker.ended(call)

    def work_ended(self, work: Work[Any]) -> None:
        """A work is over: the next one in the queue may begin."""
        work.call.failed = work.error is not None
        if work.is_collective:
            was_head = self._queue[0] is work
            self._queue.remove(work)
            self.call_ended(work.call)
            if was_head and self._queue:
                self.engine.ready.append(self._queue[0])
        else:
            work.call.ended = self.engine.now()
            self._messages.discard(work)
        self.engine.ended(work)

    def work_failed(self, work: Work[Any], error: Exception) -> None:
        """A work cannot be completed. If it is a collective, neither can the group."""
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
        reason = f"rank {self.rank} failed in {work.describe()}: {error!r}"
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
        """Whether a message that timed out arrives all the same: resent, it would come twice."""
        step = work.step
        if not isinstance(step, PostedRound) or not all(part.done for part in step.receives):
            return False
        return all(send.done or self.engine.transport.settle(send) for send in step.sends)

    def abandon(self, work: Work[Any], reason: str) -> None:
        """The caller does not want it any more: it was interrupted, or gave it up."""
        if work.over:
            return
        error = MisuseError(
            f"rank {self.rank}: {work.describe()} was given up: {reason}",
            rank=self.rank,
            op=work.name,
            sequence=work.sequence,
        )
        self.work_failed(work, error)

    def break_alone(self, work: Work[Any], error: DistributedError) -> None:
        """End a work and break the group without telling: the others know it, too."""
        self._give_up()
        work.fail(error)
        culprit = self.ranks[error.peer or 0]
        self.fail(Failure(type(error), culprit, self.engine.rank, str(error)), tell=False)

    def attend(self, work: Work[Any]) -> float:
        """See to what is due while a work is under way; seconds until this is needed again.

        A collective that waits asks whether the others are in it, too. Past its deadline it fails,
        and what is queued behind it.
        """
        now = self.engine.now()
        due = self.checker.attend(now)
        head = self._queue[0] if work.is_collective and self._queue else work
        due = min(due, check_deadline(min(work, head, key=lambda each: each.deadline), now))
        if head.is_collective and not head.over:
            due = min(due, self.checker.ask_if_due(head, now))
        return 0.0 if work.over else due - now

    # Failure --------------------------------------------------------------------------------

    def fail(self, failure: Failure, *, tell: bool = True) -> None:
        """Break the group: whatever is under way in it ends with this failure."""
        if self.failure is not None:
            return
        self.failure = failure
        self._give_up()
        self._untold = not self.under_way()
        for work in self.under_way():
            work.fail(error_for(failure, work.call, self))
        self.engine.matching.forget_group(self.id)
        if tell:
            self.engine.tell_members(self, failure.notice())

    def member_left(self, rank: int) -> None:
        """A member has closed the group, in good order: only who waits for it cannot go on."""
        self.left.add(rank)
        if self.checker.desync is not None:
            self.fail(self.checker.desync.failure)  # nobody will say what it was doing
        failure = Failure(PeerLostError, rank, rank, f"rank {self.name_of_global(rank)} left")
        for work in self._messages | set(list(self._queue)[:1]):
            if work.step is not None and work.step.needs(rank):
                self.work_failed(work, error_for(failure, work.call, self))

    def close(self) -> None:
        """End what is under way, and what was made of it; later calls are a `MisuseError`."""
        if self.closed:
            return
        self.closed = True
        self._tell_at_last()
        for child in self._made:
            child.close()
        self._give_up()
        for work in self.under_way():
            work.fail(closed_error(work.call, self))
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

    def check_usable(self, call: Call) -> None:
        """Raise the first failure of the group, or that it is closed."""
        if self.closed or self.engine.closed:
            raise closed_error(call, self)
        if self.failure is not None:
            self._untold = False
            error = error_for(self.failure, call, self, later=True)
            self.engine.history.note_on(error)
            raise error
