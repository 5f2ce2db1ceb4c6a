"""Any of several operations: what a thread waits for that goes on when one of them is done.

    receive from rank 1   - - - - - - - - -
    receive from rank 2   - - - - done          here the thread goes on, and waits for nothing else
    send to rank 3        - - - - - - - - -

It is no operation: it moves nothing, and what it waits for goes on without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from phalanx.backends.engine.overdue import Inquiry, inquiry_time

if TYPE_CHECKING:
    from phalanx.backends.engine.group import Group
    from phalanx.backends.engine.operation import Operation

SHOWN = 3  # of the operations, in messages


class Waited(Protocol):
    """What a thread may wait for: an `Operation`, or `AnyOf` several."""

    @property
    def group(self) -> Group:
        """In whose numbers ranks are named."""
        ...

    @property
    def name(self) -> str:
        """What it is."""
        ...

    @property
    def sequence(self) -> int:
        """Its number in the group; -1 if it has none."""
        ...

    @property
    def timeout(self) -> float:
        """Seconds that it may take."""
        ...

    @property
    def deadline(self) -> float:
        """When these have passed."""
        ...

    @property
    def done(self) -> bool:
        """Whether the thread goes on."""
        ...

    @property
    def is_collective(self) -> bool:
        """Whether every member of the group takes part, in the group's order."""
        ...

    @property
    def inquiry(self) -> Inquiry | None:
        """Whose fault it is that the deadline is about to pass."""
        ...

    def attend(self) -> float:
        """See to what is due; seconds until this is needed again."""
        ...

    def fail(self, error: Exception) -> None:
        """End the wait with an error."""
        ...

    def describe(self) -> str:
        """What it is, for messages."""
        ...

    def waits_for(self) -> list[int]:
        """The ranks of the group from or to which bytes are still to move."""
        ...

    def waiting_for_whole(self) -> list[int]:
        """The same, as ranks of the job."""
        ...

    def parts(self) -> Iterable[Operation]:
        """The operations that it waits for."""
        ...


class AnyOf:
    """Done when one of some operations is, of one rank, and of any groups.

    group     in whose numbers ranks are named: that of the backend which is asked
    timeout   seconds; when they have passed, the wait ends with an error, and nothing else does
    """

    name = "wait_any"
    sequence = -1
    is_collective = False

    def __init__(
        self, group: Group, operations: Iterable[Operation], timeout: float = math.inf
    ) -> None:
        self.group = group
        self.operations = tuple(operations)
        self.timeout = timeout
        self.deadline = monotonic() + timeout
        self.inquiry: Inquiry | None = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether one is, or the wait has ended with an error."""
        return self.error is not None or any(each.done for each in self.operations)

    def attend(self) -> float:
        """See to what is due for any of them; past the deadline, end with an error. Lock held."""
        due = min(each.attend() for each in self.operations)
        if self.done:
            return 0.0
        now = monotonic()
        inquire_at = self.deadline - inquiry_time(self.timeout)
        if now >= inquire_at and self.inquiry is None:
            self.inquiry = Inquiry(self)
            self.inquiry.begin()
        if now >= self.deadline:
            assert self.inquiry is not None
            self.fail(self.inquiry.verdict())
            return 0.0
        return min(due, (inquire_at if self.inquiry is None else self.deadline) - now)

    def fail(self, error: Exception) -> None:
        """End the wait. What it waits for goes on."""
        if not self.done:
            self.error = error
            self.group.engine.history.note_on(error)

    def parts(self) -> Iterable[Operation]:
        """The operations."""
        return self.operations

    def waiting_for_whole(self) -> list[int]:
        """From or to whom bytes are still to move in any of them, as ranks of the job."""
        whole = chain.from_iterable(each.waiting_for_whole() for each in self.operations)
        return list(dict.fromkeys(whole))

    def waits_for(self) -> list[int]:
        """The same, as ranks of the group, if they are members."""
        local = self.group.to_local
        return [local[rank] for rank in self.waiting_for_whole() if rank in local]

    def describe(self) -> str:
        """`wait_any (recv #3, recv #0 and 5 more)`."""
        shown = ", ".join(each.describe() for each in self.operations[:SHOWN])
        more = len(self.operations) - SHOWN
        return f"{self.name} ({shown}{f' and {more} more' if more > 0 else ''})"
