"""A device that is this host's memory, and lags behind: nothing happens there before it has to.

    caller's stream   kernels: run when a copy waits for the stream, in their order
    copies' stream    copies: one is done each time that somebody asks for an event,
                      all up to an event when a stream is told to wait for it

So what reads too early reads what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.device import CallerStream, Copies, Event, HostCopies


class Lagging:
    """An event behind so many of a stream's actions."""

    def __init__(self, stream: LaggingStream, number: int) -> None:
        self.stream, self.number = stream, number

    def query(self) -> bool:
        self.stream.go_on_to(min(self.stream.done + 1, self.number))
        return self.stream.done >= self.number


class LaggingStream:
    """Actions, of which the first `done` have been carried out."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], object]] = []
        self.done = 0
        self.stuck = False

    def add(self, action: Callable[[], object]) -> None:
        self.actions.append(action)

    def event(self) -> Lagging:
        return Lagging(self, len(self.actions))

    def go_on_to(self, number: int) -> None:
        while self.done < number and not self.stuck:
            self.done += 1
            self.actions[self.done - 1]()


class LaggingCopies(HostCopies):
    """Copies of a `LaggingStream`.

    kernels   the caller's stream
    copies    the stream of copies
    taken     bytes of page-locked memory, in all
    bytes_to_host, bytes_to_device    of queued copies
    """

    staging_bytes = 512

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.copies = LaggingStream(), LaggingStream()
        self.taken = self.bytes_to_host = self.bytes_to_device = 0
        self._page_locked: set[int] = set()

    @override
    def page_locked(self, nbytes: int) -> Tensor:
        self.taken += nbytes
        memory = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        self._page_locked.add(memory.untyped_storage().data_ptr())
        return memory

    @override
    def caller(self) -> CallerStream:
        return CallerStream(self.kernels, self.kernels.event())

    @override
    def queue(self, copies: Copies, after: Event | None = None) -> Event:
        if after is not None:
            assert isinstance(after, Lagging)
            self.copies.add(lambda: after.stream.go_on_to(after.number))
        for into, values in copies:
            if into.untyped_storage().data_ptr() in self._page_locked:
                self.bytes_to_host += into.nbytes
            else:
                self.bytes_to_device += into.nbytes
            self.copies.add(partial(into.copy_, values))
        return self.copies.event()

    @override
    def order(self, event: Event, stream: object | None = None) -> None:
        assert isinstance(event, Lagging)
        assert stream in (None, self.kernels)
        self.kernels.add(lambda: event.stream.go_on_to(event.number))

    def read(self, tensor: Tensor) -> list[float]:
        """What the caller finds when its stream has come to here."""
        self.kernels.go_on_to(len(self.kernels.actions))
        return tensor.tolist()
