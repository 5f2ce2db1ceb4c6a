"""A group: which ranks, what they are doing, and whether they still can.

It is known by its parent, its members and how many of that kind came before, so that its members
can make it without a message. Its collectives run one after the other, in the order in which they
were issued; its messages run beside them; other groups know nothing of it.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections import Counter, deque
from time import monotonic
from typing import TYPE_CHECKING

from phalanx.backends.engine.describe import describe
from phalanx.backends.engine.failure import Failure
from phalanx.errors import (
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
)

if TYPE_CHECKING:
    from phalanx.backends.engine.engine import Engine
    from phalanx.backends.engine.operation import Operation

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
        self.closed = False
        self.left: set[int] = set()  # members, as ranks of the job, that have closed the group
        self.suffix = "" if ident == WORLD_ID else f" in the group of ranks {list(ranks)}"
        self.finished = 0  # collectives of this group that are over on this rank, the last being
        self._recent: deque[tuple[int, str, str]] = deque(maxlen=64)  # (number, name, signature)
        self._sequence = 0
        self._queue: deque[Operation] = deque()
        self._messages: set[Operation] = set()
        self._children: Counter[tuple[int, ...]] = Counter()
        self._made: weakref.WeakSet[Group] = weakref.WeakSet()
        self._numbers: Counter[tuple[str, int]] = Counter()
        engine.add_group(self)

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

    def next_sequence(self) -> int:
        """The number of the next collective of this group."""
        self._sequence += 1
        return self._sequence - 1

    def next_message(self, direction: str, peer: int) -> int:
        """The number of the next message to or from this peer."""
        key = (direction, peer)
        self._numbers[key] += 1
        return self._numbers[key] - 1

    def name_of(self, local: int) -> str:
        """A member for a message: its rank here, and in the whole job where that differs."""
        whole = self.ranks[local]
        return str(local) if whole == local else f"{local} (rank {whole} of the job)"

    # Operations ---------------------------------------------------------------------------

    def issue(self, operation: Operation) -> None:
        """Begin an operation, or put it behind the collectives that were issued before."""
        self.check_usable(operation)
        if not operation.is_collective:
            self._messages.add(operation)
            operation.advance()
        else:
            self._queue.append(operation)
            if len(self._queue) == 1:
                operation.advance()

    def head_of_queue(self, operation: Operation) -> Operation:
        """The operation that has to end before this one can: itself, if it is under way."""
        return self._queue[0] if operation.is_collective and self._queue else operation

    def operation_done(self, operation: Operation) -> None:
        """An operation has ended: the next one in the queue may begin."""
        if operation.is_collective:
            was_head = self._queue[0] is operation
            self._queue.remove(operation)
            if operation.error is None:
                self.finished = operation.sequence + 1
                self._recent.append((operation.sequence, operation.name, operation.signature))
                sender = self.engine.mailbox.unasked(operation.channel)
                if sender is not None:
                    self.was_sent_too_much(operation.sequence, sender)
            if was_head and self._queue:
                self.engine.ready.append(self._queue[0])
        else:
            self._messages.discard(operation)
        self.engine.operation_done(operation)

    def operation_failed(self, operation: Operation, error: Exception) -> None:
        """An operation cannot be completed. If it is a collective, neither can the group."""
        if operation.done:
            return
        if not operation.is_collective:
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
        operation.fail(error)
        self.fail(failure)

    def seconds_left(self, operation: Operation) -> float:
        """Until this operation, or what it is queued behind, is overdue; then that one fails."""
        first = min(operation, self.head_of_queue(operation), key=lambda other: other.deadline)
        left = first.deadline - monotonic()
        if left <= 0 and not operation.done:
            self.operation_failed(first, first.timed_out())
        return left

    def was_sent_too_much(self, number: int, peer: int) -> None:
        """A member sent something for a collective in which nothing was expected from it."""
        known = (describe(*recent) for recent in self._recent if recent[0] == number)
        mine = next(known, f"collective #{number}") + self.suffix
        name = self.name_of(self.to_local[peer])
        reason = (
            f"in {mine} rank {self.rank} was sent something by rank {name} that it did not "
            "expect: the two called different things, or with other arguments"
        )
        self.fail(Failure(DesyncError, peer, self.engine.rank, reason, mine, number))

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
        operation.fail(error)
        culprit = self.ranks[error.peer or 0]
        self.fail(Failure(type(error), culprit, self.engine.rank, str(error)), tell=False)

    # Failure ------------------------------------------------------------------------------

    def fail(self, failure: Failure, *, tell: bool = True) -> None:
        """Break the group: whatever is under way in it ends with this failure."""
        if self.failure is not None:
            return
        self.failure = failure
        for operation in [*self._queue, *self._messages]:
            operation.fail(self._error(failure, operation))
        self.engine.mailbox.forget_group(self.id)
        if tell:
            self.engine.tell(self, failure)

    def member_left(self, rank: int) -> None:
        """A member has closed the group, in good order: only who waits for it cannot go on."""
        self.left.add(rank)
        failure = Failure(
            PeerLostError, rank, rank, f"rank {self.name_of(self.to_local[rank])} left"
        )
        waiting = self._messages | set(list(self._queue)[:1])
        for operation in waiting:
            ticket = operation.ticket
            if ticket is not None and self.to_local[rank] in ticket.outstanding_peers():
                self.operation_failed(operation, self._error(failure, operation))

    def close(self) -> None:
        """End what is under way, and what was made of it; later calls are a `MisuseError`."""
        if self.closed:
            return
        self.closed = True
        for child in self._made:
            child.close()
        for operation in [*self._queue, *self._messages]:
            operation.fail(self._closed_error(operation))
        self.engine.mailbox.forget_group(self.id)
        self.engine.groups.pop(self.id, None)

    def check_usable(self, operation: Operation) -> None:
        """Raise the first failure of the group, or that it is closed."""
        if self.closed or self.engine.closed:
            raise self._closed_error(operation)
        if self.failure is not None:
            raise self._error(self.failure, operation, later=True)

    def _closed_error(self, operation: Operation) -> MisuseError:
        return MisuseError(
            f"rank {self.rank}: {operation.describe()} on a backend that is closed",
            rank=self.rank,
            op=operation.name,
            sequence=operation.sequence,
        )

    def _error(
        self, failure: Failure, operation: Operation, *, later: bool = False
    ) -> DistributedError:
        """This failure, as it looks from this operation."""
        peer = self.to_local.get(failure.culprit)
        reason = failure.reason
        if failure.error is DesyncError and failure.reporter != self.engine.rank:
            # The reporter found that it and the culprit disagree; the culprit may be this rank.
            peer = self.to_local.get(failure.reporter) if peer == self.rank else peer
            reporter = self.to_local.get(failure.reporter)
            name = self.name_of(reporter) if reporter is not None else str(failure.reporter)
            if failure.signature:
                reason = f"met {failure.signature} from rank {name}"
        elif failure.reporter not in (self.engine.rank, failure.culprit):
            reason = f"{reason} (as rank {failure.reporter} of the job found)"
        broken = "the group is broken: " if later else ""
        return failure.error(
            f"rank {self.rank}: {operation.describe()}: {broken}{reason}",
            rank=self.rank,
            peer=peer,
            op=operation.name,
            sequence=operation.sequence,
            seconds=monotonic() - operation.started
            if failure.error is CollectiveTimeoutError
            else None,
        )
