"""Flights: what is under way in a library, and what is to be done when it lands."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.backends.library.library import Handle


class Flight:
    """One thing under way, in memory that it keeps alive.

    landed   called when it is over
    failed   called with the library's error, if it does not come to that
    """

    __slots__ = ("_memory", "failed", "handle", "landed")

    def __init__(
        self,
        handle: Handle,
        memory: memoryview,
        landed: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.handle = handle
        self._memory = memory
        self.landed = landed
        self.failed = failed


class Flights:
    """All that is under way, asked in the order in which it was started."""

    def __init__(self) -> None:
        self._flying: dict[Flight, None] = {}

    def add(self, flight: Flight) -> None:
        """Something was started."""
        self._flying[flight] = None

    def clear(self) -> None:
        """Nobody wants to know any more."""
        self._flying.clear()

    def poll(self) -> bool:
        """See to all that is over; whether anything was."""
        any_over = False
        for flight in list(self._flying):
            if flight not in self._flying:
                continue  # an end further up has ended this one, too
            try:
                over = flight.handle.done()
            except Exception as error:  # whatever the library raises
                del self._flying[flight]
                any_over = True
                flight.failed(error)
                continue
            if over:
                del self._flying[flight]
                any_over = True
                flight.landed()
        return any_over
