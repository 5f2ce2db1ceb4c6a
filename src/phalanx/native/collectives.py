"""The library's own collectives: for each group of ranks, the library's group, and what runs in it.

The whole job's is there from the start. That of a sub-group is formed when its first collective is
called, in a thread of its own: it needs all members, who may be busy with other groups first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from phalanx.core.failure import Failure
from phalanx.core.group import WORLD_ID, Group
from phalanx.core.steps import Call, Native, Step
from phalanx.core.work import Operation
from phalanx.native.base import Begun, CallTicket, Library
from phalanx.native.messages import first_line

if TYPE_CHECKING:
    from phalanx.native.engine import LibraryEngine
NOBODY = -1  # as a culprit: the library does not say who
SAY_WHO_WITHIN = 0.5  # seconds in which the courier may hear who has caused a failed collective
FINISH_WITHIN = 1.0  # seconds for a collective to end of which a member has left, having ended it


class GroupNative(Native):
    """What the library can do for one group.

    barriers   whether its barriers are the library's. By messages they are slower, but compare what
               the ranks do, which a library's own collectives do not.
    """

    def __init__(self, library: Library, *, barriers: bool) -> None:
        self._library = library
        self._barriers = barriers

    @override
    def has(self, call: Call) -> bool:
        return self._library.has(call) and (self._barriers or call.collective != "barrier")


class Natives:
    """The library's groups on one rank. Called with the engine's lock held."""

    def __init__(self, engine: LibraryEngine, world: Library) -> None:
        self.can = world.can
        self._engine = engine
        self._world = world
        self._groups: dict[int, Library] = {WORLD_ID: world}
        self._forming: dict[int, list[CallTicket]] = {}
        self._flying: dict[CallTicket, None] = {}
        self._doubts = Doubts(engine)
        self._broken: list[Library] = []
        self._wrecks: list[Call] = []

    @property
    def busy(self) -> bool:
        """Whether a collective is under way, in whichever group."""
        return bool(self._flying) or self._doubts.any

    def of(self, group: Group) -> Native | None:
        """What the library can do for a group; None where that is nothing."""
        if group.id != WORLD_ID and not self.can.subgroups:
            return None
        if group.size == 1:
            return None
        return GroupNative(self._world, barriers=self._engine.courier.library is None)

    def begin_at_once(self, group: Group, call: Call, seconds: float) -> Step | None:
        """See `Engine.begin_call`."""
        library = self._groups.get(group.id)
        if library is None:
            return call
        handle = None
        try:
            handle = library.collective(call)
            over = handle.wait(seconds)
        except BaseException as error:
            return Begun(call, handle, error)
        return None if over else Begun(call, handle)

    def go_on(self, operation: Operation, begun: Begun) -> CallTicket:
        """See to the end of a collective that was begun at once."""
        if begun.handle is None:
            assert begun.error is not None
            raise begun.error
        ticket = operation.ticket = CallTicket(operation, begun.call)
        ticket.handle = begun.handle
        self._flying[ticket] = None
        if isinstance(begun.error, Exception):
            self.failed(ticket, begun.error)
        elif begun.error is not None:
            raise begun.error
        return ticket

    def begin(self, operation: Operation, call: Call) -> CallTicket:
        """Start a collective, or have it started when its group is formed."""
        ticket = operation.ticket = CallTicket(operation, call)
        group = operation.group
        library = self._groups.get(group.id)
        if library is not None:
            self._start(ticket, library)
        elif self.can.ordered:  # torch's streams and devices are those of a thread: of this one
            library = self._world.subgroup(group.ranks, group.id, operation.timeout)
            self._groups[group.id] = library
            self._start(ticket, library)
        elif group.id in self._forming:
            self._forming[group.id].append(ticket)
        else:
            self._forming[group.id] = [ticket]
            threading.Thread(
                target=self._form,
                args=(group, operation.timeout),
                name=f"phalanx rank {self._engine.rank} forms a group",
                daemon=True,
            ).start()
        return ticket

    def _start(self, ticket: CallTicket, library: Library) -> None:
        ticket.handle = library.collective(ticket.call)
        self._flying[ticket] = None

    def _form(self, group: Group, timeout: float) -> None:
        library = failure = None
        try:
            library = self._world.subgroup(group.ranks, group.id, timeout)
        except Exception as error:  # whatever the library raises
            kind = self._world.kind_of(error)
            reason = f"{self._world.name} could not form{group.suffix}: {first_line(error)}"
            failure = Failure(kind, NOBODY, self._engine.rank, reason)
        engine = self._engine
        with engine.lock:
            waiting = self._forming.pop(group.id)
            if failure is not None:
                group.fail(failure)
            if library is not None:
                if group.closed or group.failure is not None:
                    library.abort()
                    library.close()
                else:
                    self._groups[group.id] = library
                    for ticket in waiting:
                        if not ticket.operation.done:
                            self._start_late(ticket, library)
            engine.run_ready()
            engine.news()

    def _start_late(self, ticket: CallTicket, library: Library) -> None:
        try:
            self._start(ticket, library)
        except Exception as error:  # as if it had been raised by post()
            ticket.operation.group.operation_failed(ticket.operation, error)

    # How they end ---------------------------------------------------------------------------

    def poll(self) -> bool:
        """See to what is over; whether anything was."""
        any_over = False
        for ticket in list(self._flying):
            if ticket.busy or ticket not in self._flying:
                continue
            handle = ticket.handle
            assert handle is not None
            try:
                over = handle.done()
            except Exception as error:  # whatever the library raises
                self.failed(ticket, error)
                any_over = True
            else:
                if over:
                    self.over(ticket)
                    any_over = True
        self._doubts.attend()
        return any_over

    def goes_on_by_itself(self, operation: Operation) -> bool:
        """Whether nobody has to look after it; and only the caller's stream can wait for it."""
        return self.can.ordered and type(operation.ticket) is CallTicket

    def waited_for(self, operation: Operation, *, streams: bool) -> CallTicket | None:
        """The collective whose handle a thread may wait for, on behalf of this operation.

        streams   whether that may be one that only makes this thread's stream wait
        """
        ticket = operation.ticket or operation.group.head_of_queue(operation).ticket
        if type(ticket) is not CallTicket or ticket not in self._flying or ticket.busy:
            return None
        assert ticket.handle is not None
        return ticket if streams or not ticket.handle.on_stream else None

    def over(self, ticket: CallTicket) -> None:
        """A collective has ended."""
        if ticket in self._flying:
            del self._flying[ticket]
            ticket.done = True
            self._engine.ready.append(ticket.operation)
            self._doubts.resolve(ticket)

    def failed(self, ticket: CallTicket, error: Exception) -> None:
        """A collective has not ended well. Somebody may say within a moment who is to blame."""
        if ticket not in self._flying:
            return
        del self._flying[ticket]
        operation = ticket.operation
        group = operation.group
        library = self._groups[group.id]
        failure = Failure(
            library.kind_of(error),
            NOBODY,
            self._engine.rank,
            f"{library.name} says: {first_line(error)}",
            operation.describe(),
            operation.sequence,
        )
        self._doubts.resolve(ticket)  # of a member that has left, perhaps
        self._doubts.add(ticket, SAY_WHO_WITHIN, lambda: group.fail(failure))

    def when_over(self, group: Group, then: Callable[[], None]) -> None:
        """Do this when the group's collective that is under way has ended, if it does so soon."""
        tickets = [ticket for ticket in self._flying if ticket.operation.group is group]
        tickets += self._forming.get(group.id, [])
        if tickets:
            self._doubts.add(tickets[0], FINISH_WITHIN, then)
        else:
            then()

    def give_up(self, ticket: CallTicket) -> None:
        """A collective has failed here: its group is broken, and the library's is of no use."""
        if ticket.done:
            return
        self._flying.pop(ticket, None)
        self._doubts.drop(ticket)
        if ticket.handle is not None:
            self._wrecks.append(ticket.call)  # the library may still have its memory
            library = self._groups.pop(ticket.operation.group.id, None)
            if library is not None:
                self._broken.append(library)
                library.abort()

    def close_group(self, group: Group) -> None:
        """This rank has closed a group."""
        library = self._groups.pop(group.id, None) if group.id != WORLD_ID else None
        if library is not None:
            library.close()

    def close(self) -> None:
        """Close all groups."""
        for library in [*self._groups.values(), *self._broken]:
            library.close()
        self._groups.clear()
        self._broken.clear()
        self._wrecks.clear()


# ------------------------------------------------------------------------------
# Doubts: what is to be said of a collective that will end soon, or for another reason.


class Doubt(NamedTuple):
    """`then` is called when the collective has ended, or at the deadline."""

    ticket: CallTicket
    deadline: float
    then: Callable[[], None]


class Doubts:
    """Those of one rank. Called with the engine's lock held.

    A member has left           while a collective goes on here, which it may have ended
    the library has failed      and the courier may hear in a moment who is to blame
    """

    def __init__(self, engine: LibraryEngine) -> None:
        self._engine = engine
        self._doubts: list[Doubt] = []

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._doubts)

    def add(self, ticket: CallTicket, seconds: float, then: Callable[[], None]) -> None:
        """Wait for the end of a collective, for so long at most."""
        self._doubts.append(Doubt(ticket, monotonic() + seconds, then))

    def attend(self) -> None:
        """See to those whose deadline has passed."""
        if self._doubts:
            now = monotonic()
            self._take(lambda doubt: now >= doubt.deadline)

    def resolve(self, ticket: CallTicket) -> None:
        """The collective has ended, well or not."""
        if self._doubts:
            self._take(lambda doubt: doubt.ticket is ticket)

    def drop(self, ticket: CallTicket) -> None:
        """Why the collective has failed is known."""
        self._doubts = [doubt for doubt in self._doubts if doubt.ticket is not ticket]

    def _take(self, chosen: Callable[[Doubt], bool]) -> None:
        taken = [doubt for doubt in self._doubts if chosen(doubt)]
        self._doubts = [doubt for doubt in self._doubts if not chosen(doubt)]
        for doubt in taken:
            self._engine.run_ready()  # what is complete has not failed
            doubt.then()
