"""An operation: steps that one rank carries out, one after the other.

Everything that a backend does is one of these, whether a caller waits for it or not: a send is an
operation of one round, a ring all-reduce one of 2(p-1) rounds. The engine carries out a step and
then calls `advance()`; nobody else drives it. What a rank does by itself between two steps, such as
to add what has come, is done by the program when it is asked for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from phalanx.core.checker import ASK_EVERY, EMPTY_HASH
from phalanx.core.recorder import UNKNOWN_SITE, CallSite, describe
from phalanx.core.steps import NOTHING, Step
from phalanx.core.watchdog import WaitForGraph, query_lead_time
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from phalanx.core.group import Group
    from phalanx.core.steps import Ticket
Combine = Callable[[int, int, memoryview], None]  # (buffer, first byte, what came)


def check_timeout(timeout: float) -> float:
    """The timeout as a float. Raises ValueError unless it is a positive number of seconds."""
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return float(timeout)


class Operation:
    """One rank's part in one collective or message.

    program      the steps; a generator may do what is to be done between them
    buffers      the memory that the rounds speak of, as bytes
    combine      reduces bytes that came into a buffer
    signature    what the operation is, for messages; `fingerprint` is its hash on the wire
    rolling_hash of a collective: all that the group was asked to do up to it (checker.py)
    site         the user's line that asked for it
    ask_at       when to ask the others whether they are in it, too
    query      whose fault it is that the deadline is about to pass
    sender       of a received message: whose it was, as a rank of the job
    """

    __slots__ = (
        "_steps",
        "ask_at",
        "buffers",
        "channel",
        "combine",
        "deadline",
        "done",
        "error",
        "fingerprint",
        "group",
        "name",
        "received",
        "rolling_hash",
        "sender",
        "sent",
        "sequence",
        "signature",
        "site",
        "started",
        "ticket",
        "timeout",
        "wait_for",
        "waited",
    )

    def __init__(
        self,
        group: Group,
        name: str,
        channel: Channel,
        sequence: int,
        program: Iterable[Step],
        buffers: tuple[memoryview, ...] = (),
        *,
        combine: Combine | None = None,
        signature: str = "",
        fingerprint: int = 0,
        rolling_hash: int = EMPTY_HASH,
        site: CallSite = UNKNOWN_SITE,
        timeout: float,
    ) -> None:
        self.group = group
        self.name = name
        self.channel = channel
        self.sequence = sequence
        self.buffers = buffers
        self.combine = combine
        self.signature = signature
        self.fingerprint = fingerprint
        self.rolling_hash = rolling_hash
        self.site = site
        self.timeout = timeout
        self.started = monotonic()
        self.deadline = self.started + timeout
        self.ask_at = self.started + ASK_EVERY
        self.wait_for: WaitForGraph | None = None
        self.sender = -1
        # If it is traced: seconds until the first byte of each round came, and bytes moved.
        self.waited = 0.0
        self.sent = self.received = 0
        self.ticket: Ticket | None = None
        self.done = False
        self.error: Exception | None = None
        self._steps: Iterator[Step] = iter(program)

    @property
    def is_collective(self) -> bool:
        """Whether every member of the group takes part, in the group's order."""
        return self.channel.kind is Kind.COLLECTIVE

    def bytes_of(self, buffer: int, start: int, stop: int) -> memoryview:
        """A part of one of the buffers."""
        return self.buffers[buffer][start:stop] if stop > start else NOTHING

    def first_step(self) -> Step | None:
        """The step with which it begins, before it does; None: there is none."""
        first = next(self._steps, None)
        if first is not None:
            self._steps = chain((first,), self._steps)
        return first

    def advance(self) -> None:
        """Go on from the round that is complete, as far as possible without waiting."""
        post = self.group.engine.post
        try:
            for step in self._steps:
                if self.done:
                    return
                self.ticket = post(self, step)
                if not self.ticket.done:
                    return
            if not self.done and self.group.may_finish(self):
                self._finish()
        except Exception as error:
            self.group.operation_failed(self, error)
        except BaseException as interruption:
            # It hit a thread that may wait for something else; nobody can take these steps again.
            self.group.abandon(self, f"interrupted by {type(interruption).__name__}")
            raise

    def fail(self, error: Exception) -> None:
        """End with an error: nothing is written into the operation's memory from now on."""
        if self.done:
            return
        self.error = error
        self.group.engine.history.note_on(error)
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self.group.engine.withdraw(ticket)
        self._finish()

    def _finish(self) -> None:
        self.done = True
        ticket, self.ticket = self.ticket, None
        if ticket is not None and ticket.receives:
            self.sender = ticket.receives[0].peer
        self.group.operation_done(self)
        # Or the memory would only be free when the garbage collector comes.
        self.buffers, self.combine, self._steps = (), None, iter(())

    def expect_within(self, seconds: float) -> None:
        """Set a new deadline, counted from now."""
        self.timeout = seconds
        self.deadline = monotonic() + seconds
        self.wait_for = None

    def attend(self) -> float:
        """See to what is due while it is under way; seconds until this is needed again."""
        return self.group.attend(self)

    def parts(self) -> Iterable[Operation]:
        """What a thread waits for that waits for this."""
        return (self,)

    def waits_for(self) -> list[int]:
        """The ranks of the group from or to which bytes are still to move."""
        head = self.group.head_of_queue(self)
        return head.ticket.outstanding_peers() if head.ticket is not None else []

    def waits_for_global(self) -> list[int]:
        """The same, as ranks of the job."""
        return [self.group.ranks[peer] for peer in self.waits_for()]

    def describe(self) -> str:
        """What the operation is: `all_reduce #41 (float32 [32, 32], sum) at train.py:57`."""
        return describe(self.name, self.sequence, self.signature, self.group.suffix, self.site)


# ------------------------------------------------------------------------------
# Any of several operations: what a thread waits for that goes on when one of them is done.
#
#   receive from rank 1   - - - - - - - - -
#   receive from rank 2   - - - - done          here the thread goes on, and waits for nothing else
#   send to rank 3        - - - - - - - - -
#
# It is no operation: it moves nothing, and what it waits for goes on without it.

SHOWN = 3  # of the operations, in messages


class Wait(Protocol):
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
    def wait_for(self) -> WaitForGraph | None:
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

    def waits_for_global(self) -> list[int]:
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
        self.wait_for: WaitForGraph | None = None
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
        inquire_at = self.deadline - query_lead_time(self.timeout)
        if now >= inquire_at and self.wait_for is None:
            self.wait_for = WaitForGraph(self)
            self.wait_for.begin()
        if now >= self.deadline:
            assert self.wait_for is not None
            self.fail(self.wait_for.verdict())
            return 0.0
        return min(due, (inquire_at if self.wait_for is None else self.deadline) - now)

    def fail(self, error: Exception) -> None:
        """End the wait. What it waits for goes on."""
        if not self.done:
            self.error = error
            self.group.engine.history.note_on(error)

    def parts(self) -> Iterable[Operation]:
        """The operations."""
        return self.operations

    def waits_for_global(self) -> list[int]:
        """From or to whom bytes are still to move in any of them, as ranks of the job."""
        whole = chain.from_iterable(each.waits_for_global() for each in self.operations)
        return list(dict.fromkeys(whole))

    def waits_for(self) -> list[int]:
        """The same, as ranks of the group, if they are members."""
        local = self.group.to_local
        return [local[rank] for rank in self.waits_for_global() if rank in local]

    def describe(self) -> str:
        """`wait_any (recv #3, recv #0 and 5 more)`."""
        shown = ", ".join(each.describe() for each in self.operations[:SHOWN])
        more = len(self.operations) - SHOWN
        return f"{self.name} ({shown}{f' and {more} more' if more > 0 else ''})"
