"""A collective of a library's own that is under way: the ticket of a `Call`."""

from __future__ import annotations

from typing import NamedTuple

from typing_extensions import override

from phalanx.backends.engine import Operation, Ticket
from phalanx.backends.library.library import Handle
from phalanx.backends.native import Call


class CallTicket(Ticket):
    """A collective of the library's under way: it needs all members, to the end."""

    __slots__ = ("busy", "call", "handle")

    def __init__(self, operation: Operation, call: Call) -> None:
        super().__init__(operation)
        self.call = call
        self.handle: Handle | None = None  # None: the group is being formed
        self.busy = False  # a thread waits for the handle

    @override
    def needs(self, rank: int) -> bool:
        return not self.done and rank in self.operation.group.to_local

    @override
    def outstanding_peers(self) -> list[int]:
        group = self.operation.group
        return [rank for rank in range(group.size) if rank != group.rank]


class Begun(NamedTuple):
    """A collective that was begun without an operation, as the step of one that goes on with it."""

    call: Call
    handle: Handle | None
    error: BaseException | None = None  # what came of it, if that was not its end
