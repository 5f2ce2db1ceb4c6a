"""Doubts: what is to be said of a collective that will end soon, or for another reason."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from phalanx.backends.library.call_ticket import CallTicket
    from phalanx.backends.library.engine import LibraryEngine


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
