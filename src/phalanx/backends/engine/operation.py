"""An operation: steps that one rank carries out, one after the other.

Everything that a backend does is one of these, whether a caller waits for it or not: a send is an
operation of one round, a ring all-reduce one of 2(p-1) rounds. The engine carries out a step and
then calls `advance()`; nobody else drives it. What a rank does by itself between two steps, such as
to add what has come, is done by the program when it is asked for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

from phalanx.backends.engine.agreement import ASK_EVERY
from phalanx.backends.engine.caller import NOWHERE, Site
from phalanx.backends.engine.describe import describe
from phalanx.backends.engine.rounds import Step
from phalanx.backends.engine.ticket import NOTHING
from phalanx.backends.engine.trail import START
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from phalanx.backends.engine.group import Group
    from phalanx.backends.engine.overdue import Inquiry
    from phalanx.backends.engine.ticket import Ticket

Combine = Callable[[int, int, memoryview], None]  # (buffer, first byte, what came)


class Operation:
    """One rank's part in one collective or message.

    program      the steps; a generator may do what is to be done between them
    buffers      the memory that the rounds speak of, as bytes
    combine      reduces bytes that came into a buffer
    signature    what the operation is, for messages; `fingerprint` is its hash on the wire
    trail        of a collective: what the group has been asked to do, up to this (trail.py)
    site         the user's line that asked for it
    ask_at       when to ask the others whether they are in it, too
    inquiry      whose fault it is that the deadline is about to pass
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
        "inquiry",
        "name",
        "received",
        "sender",
        "sent",
        "sequence",
        "signature",
        "site",
        "started",
        "ticket",
        "timeout",
        "trail",
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
        trail: int = START,
        site: Site = NOWHERE,
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
        self.trail = trail
        self.site = site
        self.timeout = timeout
        self.started = monotonic()
        self.deadline = self.started + timeout
        self.ask_at = self.started + ASK_EVERY
        self.inquiry: Inquiry | None = None
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
        self.inquiry = None

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

    def waiting_for_whole(self) -> list[int]:
        """The same, as ranks of the job."""
        return [self.group.ranks[peer] for peer in self.waits_for()]

    def describe(self) -> str:
        """What the operation is: `all_reduce #41 (float32 [32, 32], sum) at train.py:57`."""
        return describe(self.name, self.sequence, self.signature, self.group.suffix, self.site)
