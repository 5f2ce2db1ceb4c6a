"""An operation: rounds and local steps that one rank carries out, one after the other.

Everything that a backend does is one of these, whether a caller waits for it or not: a send is an
operation of one round, a ring all-reduce one of 2(p-1) rounds. The engine moves the bytes of a
round and then calls `advance()`; nobody else drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from phalanx.backends.engine.describe import describe
from phalanx.backends.engine.rounds import Round
from phalanx.errors import CollectiveTimeoutError
from phalanx.wire.frame import Channel, Kind

if TYPE_CHECKING:
    from phalanx.backends.engine.group import Group
    from phalanx.backends.engine.ticket import Ticket

LocalStep = Any  # whatever the operation's `local` understands
_NOTHING = memoryview(b"")
Combine = Callable[[int, int, memoryview], None]  # (buffer, first byte, what came)


class Operation:
    """One rank's part in one collective or message.

    program      rounds, and local steps to be done between them
    buffers      the memory that the rounds speak of, as bytes
    combine      reduces bytes that came into a buffer
    local        carries out a local step
    signature    what the operation is, for messages; `fingerprint` is its hash on the wire
    """

    __slots__ = (
        "_next",
        "buffers",
        "channel",
        "combine",
        "deadline",
        "done",
        "error",
        "fingerprint",
        "group",
        "local",
        "name",
        "program",
        "sequence",
        "signature",
        "started",
        "ticket",
        "timeout",
    )

    def __init__(
        self,
        group: Group,
        name: str,
        channel: Channel,
        sequence: int,
        program: Sequence[Round | LocalStep],
        buffers: tuple[memoryview, ...],
        *,
        combine: Combine | None = None,
        local: Callable[[LocalStep], None] | None = None,
        signature: str = "",
        fingerprint: int = 0,
        timeout: float,
    ) -> None:
        self.group = group
        self.name = name
        self.channel = channel
        self.sequence = sequence
        self.program = program
        self.buffers = buffers
        self.combine = combine
        self.local = local
        self.signature = signature
        self.fingerprint = fingerprint
        self.timeout = timeout
        self.started = monotonic()
        self.deadline = self.started + timeout
        self.ticket: Ticket | None = None
        self.done = False
        self.error: Exception | None = None
        self._next = 0

    @property
    def is_collective(self) -> bool:
        """Whether every member of the group takes part, in the group's order."""
        return self.channel.kind is Kind.COLLECTIVE

    def bytes_of(self, buffer: int, start: int, stop: int) -> memoryview:
        """A part of one of the buffers."""
        return self.buffers[buffer][start:stop] if stop > start else _NOTHING

    def advance(self) -> None:
        """Go on from the round that is complete, as far as possible without waiting."""
        post = self.group.engine.post
        program = self.program
        try:
            while not self.done:
                if self._next == len(program):
                    self._finish()
                    return
                step = program[self._next]
                self._next += 1
                if type(step) is Round:
                    self.ticket = post(self, step)
                    if not self.ticket.done:
                        return
                else:
                    assert self.local is not None
                    self.local(step)
        except Exception as error:
            self.group.operation_failed(self, error)

    def fail(self, error: Exception) -> None:
        """End with an error: nothing is written into the operation's memory from now on."""
        if self.done:
            return
        self.error = error
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self.group.engine.withdraw(ticket)
        self._finish()

    def _finish(self) -> None:
        self.done = True
        self.ticket = None
        self.group.operation_done(self)

    def expect_within(self, seconds: float) -> None:
        """Set a new deadline, counted from now."""
        self.timeout = seconds
        self.deadline = monotonic() + seconds

    def waits_for(self) -> list[int]:
        """The ranks of the group from or to which bytes are still to move."""
        head = self.group.head_of_queue(self)
        return head.ticket.outstanding_peers() if head.ticket is not None else []

    def describe(self) -> str:
        """What the operation is, for a message: `all_reduce #41 (float32 [32, 32], sum)`."""
        return describe(self.sequence, self.name, self.signature) + self.group.suffix

    def timed_out(self) -> CollectiveTimeoutError:
        """The error for a deadline that has passed."""
        group = self.group
        peers = self.waits_for()
        head = group.head_of_queue(self)
        whom = ", ".join(str(group.name_of(p)) for p in peers) or "nobody"
        behind = f" (it is queued behind {head.describe()})" if head is not self else ""
        noun = "ranks" if len(peers) > 1 else "rank"
        return CollectiveTimeoutError(
            f"rank {group.rank}: {self.describe()} waited {self.timeout:g} s for {noun} {whom}"
            f"{behind}. Either it never made the matching call, or it is slower than timeout= "
            f"allows.",
            rank=group.rank,
            peer=peers[0] if peers else None,
            op=self.name,
            sequence=self.sequence,
            seconds=self.timeout,
        )
