"""Handles: what is under way in MPI."""

from __future__ import annotations

from typing_extensions import override

from phalanx.backends.library.library import Handle
from phalanx.backends.mpi.patience import wait_until
from phalanx.backends.mpi.steps import Request, Steps


class MpiHandle(Handle):
    """A request, and, of a collective, those that follow it.

    steps    yields the requests, one after the other, and does what is to be done in between
    pending  the handles that are not over, of which this is one until it is
    looks    how many are taken at once by who waits
    """

    __slots__ = ("_is_receive", "_looks", "_pending", "_request", "_steps")

    def __init__(
        self, steps: Steps, pending: set[MpiHandle], looks: int, *, is_receive: bool = False
    ) -> None:
        self._steps = steps
        self._looks = looks
        self._is_receive = is_receive
        self._request: Request = next(steps, None)
        self._pending = pending
        if self._request is not None:
            pending.add(self)

    @override
    def done(self) -> bool:
        request = self._request
        while request is not None:
            if not request.Test():
                return False
            self._request = request = next(self._steps, None)
            if request is None:
                self._pending.discard(self)
        return True

    @override
    def wait(self, seconds: float) -> bool:
        return wait_until(self.done, seconds, self._looks)

    def cancel(self) -> None:
        """Give up a receive whose message has not come. MPI cancels nothing else."""
        if self._is_receive and self._request is not None:
            self._request.Cancel()
            self.done()


def message(request: Request, memory: memoryview) -> Steps:
    """The one step of a message, and the memory that it keeps alive meanwhile."""
    yield request
    del memory
