"""Tensors on a device, such as a GPU: their bytes on the way to and from this host's memory.

    HostCopies         copies between one device and page-locked memory: an interface
    AcceleratorCopies  the same by `torch.accelerator`
    Copied             a step: the end of queued copies

Copies run on a stream of their own, one after the other, beside the caller's computation:

    caller's stream  --kernels--*--kernels------------------------------*--kernels-->
                                |                                       ^
    copies' stream              +--to host--*-----------*--to device--*-+
                                            v           ^
    this thread                             +--bytes----+
                                              move
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.core.call import Call
from phalanx.core.steps import Step
from phalanx.wire.memory import copy_bits

# A staging buffer is copied at 10 to 50 GB/s, so in 0.1 to 0.4 ms: long beside the cost of queueing
# a copy (10 us), short beside a collective of several.
STAGING_BYTES = 4 << 20
BUFFERS_KEPT = 4  # of each device, between collectives; one that is under way has two

_WITHOUT_STREAMS = frozenset({"mps"})  # accelerators on which copies cannot be queued like this


class Event(Protocol):
    """A place in a stream's order."""

    def query(self) -> bool:
        """Return whether the device has reached it."""
        ...


class CallerStream(NamedTuple):
    """The stream that was current at a call, and its queue at that time."""

    stream: object
    event: Event


Copies: TypeAlias = "Iterable[tuple[Tensor, Tensor]]"
"""Where to, and what: contiguous, of one dtype and size."""


class HostCopies(ABC):
    """Copies between one device and page-locked memory of this host, on a stream of their own.

    Copies are done in the order in which they are queued; none blocks this thread. Staging buffers
    are given to one collective after the other: copies of a later one are queued behind those of an
    earlier one.

    staging_bytes   of a staging buffer; the same on every rank
    """

    staging_bytes: ClassVar[int] = STAGING_BYTES

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @abstractmethod
    def page_locked(self, nbytes: int) -> Tensor:
        """Return new page-locked memory, as bytes."""

    @abstractmethod
    def caller(self) -> CallerStream:
        """Return this thread's current stream, and its queue so far."""

    @abstractmethod
    def queue(self, copies: Copies, after: Event | None = None) -> Event:
        """Queue copies, behind `after`; return the event at their end."""

    @abstractmethod
    def order(self, event: Event, stream: object | None = None) -> None:
        """Let the next work of a stream (by default this thread's current one) await an event."""

    def room_for(self, tensor: Tensor) -> Tensor:
        """Return page-locked memory for all of a tensor, of its shape and dtype, uninitialized."""
        return self.page_locked(tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor in page-locked memory. Block until this thread's stream is here."""
        host = self.room_for(tensor)
        copy_bits(host, tensor)
        return host

    def borrow(self, nbytes: int) -> Tensor:
        """Return a staging buffer that nobody else uses."""
        if nbytes == self.staging_bytes and self._buffers:
            return self._buffers.pop()
        return self.page_locked(nbytes)

    def give_back(self, buffer: Tensor) -> None:
        """Keep a staging buffer for the next collective, unless there are enough."""
        if buffer.nbytes == self.staging_bytes and len(self._buffers) < BUFFERS_KEPT:
            self._buffers.append(buffer)


class Copied(Step):
    """A step that ends when copies are done. It waits for this rank's device, and no other rank."""

    __slots__ = ("_event",)

    wakes: ClassVar[bool] = False

    def __init__(self, event: Event) -> None:
        self._event = event

    @override
    def begin(self, call: Call) -> None:
        """Do nothing: the copies were queued before."""

    @override
    def ready(self, *, spin: float = 0.0) -> bool:
        return self._event.query()

    @override
    def waits_for(self) -> list[int]:
        return []


class AcceleratorCopies(HostCopies):
    """Copies by `torch.accelerator`: CUDA, ROCm, XPU, and devices that others add to torch."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream = torch.Stream(device)

    @override
    def page_locked(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    @override
    def caller(self) -> CallerStream:
        stream = torch.accelerator.current_stream(self._device)
        return CallerStream(stream, stream.record_event())

    @override
    def queue(self, copies: Copies, after: Event | None = None) -> Event:
        with self._current():
            if after is not None:
                self._stream.wait_event(after)  # type: ignore[arg-type]
            for into, values in copies:
                into.copy_(values, non_blocking=True)
            return self._stream.record_event()

    @override
    def order(self, event: Event, stream: object | None = None) -> None:
        waits = stream or torch.accelerator.current_stream(self._device)
        waits.wait_event(event)  # type: ignore[attr-defined]

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the copies' stream this thread's current one, and its device, too."""
        index = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)


def device_kinds() -> frozenset[str]:
    """Return the kinds of device with copies to and from this host's memory, and the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu"} | ({accelerator.type} if accelerator is not None else set())
    return frozenset(kinds - _WITHOUT_STREAMS)


def device_of(place: int, ranks: int) -> torch.device:
    """Return the accelerator of this number, or the CPU if not each of so many ranks has one."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type not in device_kinds():
        return torch.device("cpu")
    if torch.accelerator.device_count() < ranks:
        return torch.device("cpu")
    return torch.device(accelerator.type, place)
