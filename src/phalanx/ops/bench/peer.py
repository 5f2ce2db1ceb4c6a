"""The benchmark's interface of a library, as one rank sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import phalanx.collectives as ours
from phalanx.core.backend import Backend
from phalanx.ops.bench.operations import (
    OPERATIONS,
    BenchOperation,
    PreparedCall,
    TrainedModel,
    TrainingStep,
    elements_of,
    task_of,
)

T = TypeVar("T")
Call = Callable[[], object]
Binder = Callable[[PreparedCall], Call]
"""Returns what does it once, in the memory of the call; may give the call its other functions."""


@dataclass(frozen=True)
class RankContext:
    """One rank of a benchmark: the parts to make peers from, and the ranks' exchanges.

    backend   over TCP, idle while anything is timed: for the ranks' exchanges between rounds
    master    a name of rank 0's host
    timeout   seconds that a rank waits for another
    width     of the layers of a trained model; 0: the operation's own
    buffers   (use, elements, device) -> torch's memory, which all peers use, one after the other
    """

    backend: Backend
    master: str
    timeout: float
    width: int = 0
    buffers: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank. Within an `attempt` that has failed elsewhere,
        raise: the failed rank calls no `gather`.
        """
        values, problem = self._exchange(value)
        if problem:
            raise _AttemptFailedError(problem)
        return values

    def problem(self, here: str) -> str:
        """Return the first rank's problem, on every rank; empty if no rank has one."""
        return self._exchange(None, here)[1]

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """Run it on every rank; return its result here, and the first rank's `problem`."""
        result, here = None, ""
        try:
            result = action()
        except _AttemptFailedError as failed:
            return None, str(failed)
        except Exception as error:
            here = f"{type(error).__name__}: {error}"
        return result, self.problem(here)

    def _exchange(self, value: Any, here: str = "") -> tuple[list[Any], str]:
        """Return every rank's value, and the first rank's problem."""
        values, texts = zip(*ours.all_gather_object((value, here), self.backend), strict=True)
        if len(set(texts)) == 1:
            return list(values), here
        first = next(rank for rank, text in enumerate(texts) if text)
        return list(values), f"rank {first}: {texts[first]}"


class _AttemptFailedError(Exception):
    """An attempt that has failed on another rank, as every rank knows."""


class Peer:
    """A library under test, made by a row of the table of peers, on every rank at one time.

    does        its operations: name -> function that makes a call of it
    beside      its operation beside another one, if not the same: it shows the machine's limit
    memories    the kinds of memory that it can be given; without "ordinary", it uses these always
    device      of the messages' memory
    """

    does: Mapping[str, Binder]
    beside: Mapping[str, str] = MappingProxyType({})
    memories: frozenset[str] = frozenset({"ordinary"})
    device: str = "cpu"

    def __init__(self, context: RankContext) -> None:
        self.rank, self.size = context.backend.rank, context.backend.world_size
        self.width = context.width
        self._buffers = context.buffers

    def algorithms(self, operation: BenchOperation) -> tuple[str, ...]:
        """Return the algorithms that can be requested by name: the same on every rank."""
        return ("auto",)

    def empty(self, elements: int) -> Tensor:
        """Return memory of the library's own kind, if it has such."""
        return torch.empty(elements)

    def finish(self) -> None:
        """Wait until the last call has arrived, if calls return before."""

    def close(self) -> None:
        """Leave the library in its former state, as far as possible."""

    def prepare(
        self, operation: BenchOperation, count: int, kind: str = "ordinary", algorithm: str = "auto"
    ) -> PreparedCall:
        """Return a call on messages of `count` bytes in this kind of memory."""
        bind = self.does[operation.name]
        if operation.name in self.beside:
            operation = OPERATIONS[self.beside[operation.name]]
        n = operation.fitting(self.size, count)

        def make(use: str, what: str) -> Tensor:
            elements = elements_of(what, self.size, n)
            if kind == "registered":
                return self.empty(elements)
            key = (use, elements, self.device)
            if key not in self._buffers:  # touched: no page is missing when it is timed
                self._buffers[key] = torch.zeros(elements, device=self.device)
            return self._buffers[key]

        source = make("source", operation.given)
        out, fresh = source, kind == "fresh"
        if fresh:  # not known before the first call
            out = torch.empty(0)
        elif kind == "into" or not operation.in_place:
            out = make("out", operation.expected)
        call = PreparedCall(operation, n, source, out, fresh, algorithm, finish=self.finish)
        call.call = bind(call)
        return call

    def step(
        self, call: PreparedCall, wrap: Callable[[nn.Module], TrainedModel], *, alone: bool = False
    ) -> Call:
        """Return the training step of one rank, which trains with the others or by itself."""
        task = task_of(call.operation.name, self.width)
        ranks = range(self.rank, self.rank + 1) if alone else range(self.size)
        step = TrainingStep(task, wrap, rank=self.rank, ranks=ranks)
        call.load, call.count_wrong = step.load, step.count_wrong
        return step.call

    def messages(
        self,
        call: PreparedCall,
        send: Callable[[Tensor, int], object],
        recv: Callable[[Tensor, int], object],
    ) -> Call:
        """Return the messages between this rank and its neighbour, with these functions of (tensor,
        peer).

        `ping_pong` goes there and back in one call. In a `stream` the even rank sends, and the
        other confirms when it has everything.
        """
        data, peer, finish = call.source, self.rank ^ 1, call.finish
        if peer >= self.size:  # the last of an odd number has nobody
            return lambda: None
        first, second = (send, recv) if self.rank % 2 == 0 else (recv, send)

        def there_and_back() -> None:
            first(data, peer)
            second(data, peer)

        if call.operation.name == "ping_pong":
            return there_and_back
        token = torch.zeros(1, device=data.device)

        def end_of_stream() -> None:
            second(token, peer)
            finish()

        call.finish = end_of_stream
        return lambda: first(data, peer)
