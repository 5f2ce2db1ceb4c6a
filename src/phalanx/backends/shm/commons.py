"""The commons: what the ranks of one host share, as one of them has it.

    ledger        where this rank says what memory it shows
    arena         that memory
    neighbours    the other ranks of the host: their ledgers, and the bells that wake them
    lanes         for each of them, what large messages go through
    windows       for each group, what its members show each other

A rank that waits for a flag looks at it for a short while, and then sleeps until a neighbour rings
its bell, a pipe: whoever raises a flag rings for those who say in their ledgers that they sleep.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.backends.engine.ticket import Ticket
from phalanx.backends.shm import lane
from phalanx.backends.shm.arena import Arena
from phalanx.backends.shm.fence import keeps_order, make_fence
from phalanx.backends.shm.lane import Lane
from phalanx.backends.shm.ledger import ASLEEP, SIZE, Ledger, LedgerOfPeer
from phalanx.backends.shm.meeting import Meet
from phalanx.backends.shm.pane import Pane
from phalanx.backends.shm.segment import open_of
from phalanx.backends.shm.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.backends.engine import Group, Operation


class Neighbour:
    """Another rank of this host."""

    def __init__(self, rank: int, process: int, memory: int, bell: int) -> None:
        self.rank = rank
        self.is_here = process == os.getpid()  # a thread of this process
        self.ledger = LedgerOfPeer(process, memory)
        self._bell = open_of(process, bell, os.O_WRONLY | os.O_NONBLOCK)

    def wake(self) -> None:
        """Ring, if it sleeps."""
        if self.ledger.words[ASLEEP]:
            self.ring()

    def ring(self) -> None:
        """Wake it."""
        with suppress(BlockingIOError, BrokenPipeError):  # it rings already; it is gone
            os.write(self._bell, b"!")

    def pane(self, group: int) -> Pane | None:
        """What it shows to the members of a group, once it has made that."""
        found = self.ledger.window(group)
        if found is None:
            return None
        try:
            segment = self.ledger.segment(found[0])
        except (FileNotFoundError, ProcessLookupError):  # its process is gone, or has closed it
            return None
        return Pane(self.rank, segment, found[1], self.ledger.segment)

    def close(self) -> None:
        """Ring no more."""
        os.close(self._bell)


class Commons:
    """One rank's. All methods are called with the engine's lock held."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.weak_order = not keeps_order()
        self.fence = make_fence()
        lanes = world_size * lane.SIZE
        self.ledger = Ledger(lanes)
        self.arena = Arena(self.ledger.segment, SIZE + lanes, self.ledger.add_segment)
        self.neighbours: dict[int, Neighbour] = {}
        self.lanes: dict[int, Lane] = {}
        self.stalled: dict[Lane, Callable[[], None]] = {}  # full lanes, and what to do when not
        self.watched: dict[Ticket, Meet] = {}
        self.bell, self._rope = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.begins_to_wait: Callable[[], None] = _nothing  # called when something is to come
        self._rank = rank
        self._retired: list[Window] = []
        self._disputed: set[Ticket] = set()

    @property
    def memory(self) -> int:
        """For the others: the number of the ledger's file in this process."""
        return self.ledger.segment.fd

    @property
    def rope(self) -> int:
        """For the others: the number of the file that rings this rank's bell."""
        return self._rope

    def meet(self, rank: int, process: int, memory: int, bell: int) -> None:
        """Another rank of this host. Raises OSError if its memory cannot be had."""
        neighbour = Neighbour(rank, process, memory, bell)
        self.neighbours[rank] = neighbour
        self.lanes[rank] = Lane(self, self._rank, neighbour, SIZE)

    def window(self, group: Group) -> Window | None:
        """A window for those members of a group that are on this host, if there are others."""
        me = group.engine.rank
        ranks = tuple(rank for rank in group.ranks if rank == me or rank in self.neighbours)
        if len(ranks) == 1:
            return None
        self._clear_away()
        return Window(self, group.id, ranks, me)

    def retire(self, window: Window) -> None:
        """A group was closed."""
        self._retired.append(window)

    def _clear_away(self) -> None:
        """Take back the memory of windows through which nobody looks any more."""
        for window in [window for window in self._retired if window.is_over()]:
            self._retired.remove(window)
            window.give_back()

    # Waiting --------------------------------------------------------------------------------

    def post(self, operation: Operation, meet: Meet) -> Ticket:
        """Come to a meeting."""
        ticket = Ticket(operation, meet)
        operation.ticket = ticket
        meet.begin(operation.trail)
        if self._is_complete(ticket, meet):
            ticket.arm()
        else:
            ticket.arm(meeting=True)
            self.watched[ticket] = meet
        return ticket

    def stall(self, lane: Lane, go_on: Callable[[], None]) -> None:
        """A lane is full: when it is not, go on."""
        self.stalled[lane] = go_on
        self.begins_to_wait()

    @property
    def waits(self) -> bool:
        """Whether something is to come of which only memory tells."""
        return bool(self.watched or self.stalled)

    def look(self) -> None:
        """See which meetings everybody has come to, so that their operations are ready to go on;
        and which lanes have room again.
        """
        for lane_, go_on in list(self.stalled.items()):
            if not lane_.is_full:
                del self.stalled[lane_]
                go_on()
        for ticket, meet in list(self.watched.items()):
            if self._is_complete(ticket, meet):
                self.forget(ticket)
                ticket.part_done()

    def _is_complete(self, ticket: Ticket, meet: Meet) -> bool:
        absent = meet.absent()  # first: who comes between the two looks is still to be checked
        stranger = meet.stranger()
        if stranger is None:
            return not absent
        if ticket not in self._disputed:
            self._disputed.add(ticket)
            ticket.operation.group.agreement.has_parted(ticket.operation, stranger)
        return False

    def forget(self, ticket: Ticket) -> None:
        """An operation was given up."""
        self.watched.pop(ticket, None)
        self._disputed.discard(ticket)

    def lie_down(self) -> None:
        """Say that this rank sleeps; then look again, for flags that were raised meanwhile.

        Who raises a flag looks here afterwards. With a fence on both sides, at least one of the two
        sees what the other has written.
        """
        self.ledger.words[ASLEEP] = 1
        self.fence()
        self.look()

    @property
    def is_asleep(self) -> bool:
        """Whether this rank has said that it sleeps."""
        return self.ledger.words[ASLEEP] != 0

    def get_up(self) -> None:
        """This rank is awake: it looks for itself."""
        self.ledger.words[ASLEEP] = 0

    def heard_bell(self, readable: bool, writable: bool) -> None:
        """The bell was rung (from the reactor)."""
        with suppress(BlockingIOError):
            while os.read(self.bell, 4096):
                pass

    def close(self) -> None:
        """Nobody can share anything with this rank any more."""
        for neighbour in self.neighbours.values():
            neighbour.close()
        self.lanes.clear()  # they and this know each other: the memory would stay mapped
        self.stalled.clear()
        self.arena.close()
        os.close(self.bell)
        os.close(self._rope)


def _nothing() -> None:
    pass
