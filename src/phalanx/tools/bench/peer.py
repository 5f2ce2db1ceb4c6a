"""`Peer`: one library as one rank of a benchmark sees it; and what the ranks tell each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from phalanx.collectives import all_gather_object, barrier, broadcast_object
from phalanx.core.backend import Backend
from phalanx.tools.bench.operations import (
    MEMORY_KINDS,
    BenchOperation,
    MessageBuffers,
    PreparedCall,
)
from phalanx.tools.bench.training import TrainedModel, TrainingStep, task_of

T = TypeVar("T")


class Control:
    """What the ranks of a benchmark tell each other between rounds: a backend over TCP.

    It is idle while anything is timed.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rank = backend.rank
        self.size = backend.world_size
        self.topology = backend.topology

    def barrier(self) -> None:
        """Wait until every rank is here."""
        barrier(self._backend)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return all_gather_object(value, self._backend)

    def slowest(self, seconds: list[float]) -> list[float]:
        """For each place of the list, the largest that a rank has."""
        return [max(values) for values in zip(*self.gather(seconds), strict=True)]

    def from_root(self, value: Any) -> Any:
        """Rank 0's value."""
        return broadcast_object(value if self.rank == 0 else None, self._backend)

    def problem(self, here: str) -> str:
        """The first rank's problem, on every rank; empty where no rank has one."""
        texts = self.gather(here)
        alike = len(set(texts)) == 1
        found = (
            text if alike else f"rank {rank}: {text}" for rank, text in enumerate(texts) if text
        )
        return next(found, "")

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """Do it on every rank: its result here, and the first rank's problem, as for `problem`."""
        result, here = None, ""
        try:
            result = action()
        except Exception as error:
            here = f"{type(error).__name__}: {error}"
        return result, self.problem(here)


class RankContext(NamedTuple):
    """What a peer is made from; every rank makes it at the same time.

    master    a name of rank 0's host
    timeout   seconds that a rank waits for another
    width     of the layers of what is trained; 0: the operation's own
    """

    control: Control
    master: str
    timeout: float
    width: int = 0


Binder = Callable[[BenchOperation, Tensor | None, Tensor | None, bool, str], PreparedCall]
"""(operation, source, out or None, fresh, algorithm) -> the call."""


class Peer(ABC):
    """What a row of the table of peers makes.

    memories    the kinds of memory that it can be given
    only        the kind that it uses whatever was requested, or empty
    device      of the messages' memory
    """

    memories: frozenset[str] = frozenset({"ordinary"})
    only: str = ""
    device: str = "cpu"

    def __init__(self, context: RankContext) -> None:
        self.rank, self.size = context.control.rank, context.control.size
        self.width = context.width

    @property
    @abstractmethod
    def binders(self) -> Mapping[str, Binder]:
        """What it can do: an operation's name -> what makes a call of it."""

    def algorithms(self, operation: BenchOperation) -> tuple[str, ...]:
        """The algorithms that can be requested by name: the same on every rank."""
        return ("auto",)

    def empty(self, elements: int) -> Tensor:
        """Memory of its own, where it has such."""
        return torch.empty(elements)

    def measured(self, operation: BenchOperation) -> BenchOperation:
        """What it does beside this operation: the same, unless it shows what the machine can do."""
        return operation

    def prepare(
        self,
        operation: BenchOperation,
        count: int,
        kind: str,
        algorithm: str,
        memory: MessageBuffers,
    ) -> PreparedCall:
        """A call on messages of `count` bytes in this kind of memory."""
        operation = self.measured(operation)
        registered, fresh, apart = MEMORY_KINDS[kind]
        n = operation.fitting(self.size, count)

        def make(use: str, part: str) -> Tensor:
            elements = operation.elements(part, self.size, n)
            return self.empty(elements) if registered else memory.empty(use, elements, self.device)

        source: Tensor | None = None
        out: Tensor | None = None
        if operation.source:
            source = make("source", operation.source)
            if operation.in_place and not apart and not fresh:
                out = source
            elif not fresh:
                out = make("out", operation.out)
        return self.binders[operation.name](operation, source, out, fresh, algorithm)

    def step(
        self, operation: BenchOperation, wrap: Callable[[nn.Module], TrainedModel]
    ) -> TrainingStep:
        """The training step of one rank of those that train together."""
        task = task_of(operation.name, self.width)
        return TrainingStep(operation, task, wrap, rank=self.rank, ranks=range(self.size))

    def messages(
        self,
        operation: BenchOperation,
        data: Tensor | None,
        send: Callable[[Tensor, int], object],
        recv: Callable[[Tensor, int], object],
        finish: Callable[[], object] | None = None,
    ) -> PreparedCall:
        """Messages between this rank and its neighbour, with these functions of (tensor, peer).

        `ping_pong` goes there and back in one call. In a `stream` the even rank sends, and when
        the other has everything it says so.
        """
        assert data is not None
        peer = self.rank ^ 1
        token = torch.zeros(1, device=data.device)
        if peer >= self.size:  # the last of an odd number has nobody
            return PreparedCall(operation, data, data, lambda: None)
        first, second = (send, recv) if self.rank % 2 == 0 else (recv, send)

        def there_and_back() -> None:
            first(data, peer)
            second(data, peer)

        def end_of_stream() -> None:
            second(token, peer)
            if finish is not None:
                finish()

        if operation.name == "ping_pong":
            return PreparedCall(operation, data, data, there_and_back, finish)
        return PreparedCall(operation, data, data, lambda: first(data, peer), end_of_stream)

    def close(self) -> None:  # noqa: B027 -- most need nothing
        """Leave the library as it was found, as far as it can be."""
