"""`Peer`: one library, as one rank of a benchmark sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.collectives import all_gather_object, barrier, broadcast_object
from phalanx.tools.bench.operations import MEMORIES, Exchange, Memory, Operation

if TYPE_CHECKING:
    from phalanx.core.backend import Backend


class Place(NamedTuple):
    """This rank's place, from which a peer is made; every rank makes it at the same time."""

    control: Control
    master: str  # a name of rank 0's host
    timeout: float
    width: int = 0  # of the layers of what is trained; 0: the operation's own

    @property
    def rank(self) -> int:
        """This rank."""
        return self.control.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.control.size


Binder = Callable[[Operation, Tensor | None, Tensor | None, bool, str], Exchange]
"""(operation, source, out or None, fresh, algorithm) -> the exchange."""


class Peer(ABC):
    """What a row of the table of peers makes.

    memories    the kinds of memory that it can be given
    only        the kind that it uses whatever was asked for, or empty
    binders     operation's name -> what makes an exchange of it
    """

    memories: frozenset[str] = frozenset({"ordinary"})
    only: str = ""

    def __init__(self, place: Place) -> None:
        self.rank, self.size, self.width = place.rank, place.size, place.width

    @property
    @abstractmethod
    def binders(self) -> Mapping[str, Binder]:
        """What it can do."""

    def algorithms(self, operation: Operation) -> tuple[str, ...]:
        """The algorithms that can be asked for by name: the same on every rank."""
        return ("auto",)

    def empty(self, elements: int) -> Tensor:
        """Memory of its own, where it has such."""
        return torch.empty(elements)

    def exchange(
        self, operation: Operation, count: int, kind: str, algorithm: str, memory: Memory
    ) -> Exchange:
        """An exchange of `count` bytes with this kind of memory."""
        registered, fresh, apart = MEMORIES[kind]
        n = operation.fitting(self.size, count)
        given = operation.elements(operation.source, self.size, n)
        gotten = operation.elements(operation.out, self.size, n)
        source: Tensor | None = None
        out: Tensor | None = None
        if operation.source is not None:
            source = self.empty(given) if registered else memory.empty("source", given)
            if operation.in_place and not apart and not fresh:
                out = source
            elif not fresh:
                out = self.empty(gotten) if registered else memory.empty("out", gotten)
        return self.binders[operation.name](operation, source, out, fresh, algorithm)

    def close(self) -> None:  # noqa: B027 -- most need nothing
        """Leave the library as it was found, as far as it can be."""


def messages(
    operation: Operation,
    data: Tensor | None,
    rank: int,
    size: int,
    send: Callable[[Tensor, int], object],
    recv: Callable[[Tensor, int], object],
) -> Exchange:
    """Messages between this rank and its neighbour, with these functions of (tensor, peer).

    `ping_pong` goes there and back in one call. In a `stream` the even rank sends, and when the
    other has everything it says so.
    """
    assert data is not None
    peer = rank ^ 1
    token = torch.zeros(1)
    if peer >= size:  # the last of an odd number has nobody
        return Exchange(operation, data, data, lambda: None)
    first, second = (send, recv) if rank % 2 == 0 else (recv, send)

    def there_and_back() -> None:
        first(data, peer)
        second(data, peer)

    if operation.name == "ping_pong":
        return Exchange(operation, data, data, there_and_back)
    return Exchange(operation, data, data, lambda: first(data, peer), lambda: second(token, peer))


# ------------------------------------------------------------------------------
# `Learner`: a model that trains on this rank, whoever trains it.


class Learner(ABC):
    """What a benchmark does with a model, besides training it.

    model   is called with this rank's samples
    """

    model: nn.Module

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those that this rank's optimizer steps."""
        return self.model.parameters()

    @abstractmethod
    def remember(self) -> None:
        """Remember the parameters, for `rewind`. Every rank calls it."""

    @abstractmethod
    def rewind(self) -> None:
        """Make the parameters what they were. Every rank calls it."""

    @abstractmethod
    def whole(self) -> dict[str, Tensor]:
        """All parameters, by the names of the plain model. Every rank calls it."""


class Plain(Learner):
    """Every parameter is here: of a plain model, or one whose gradients are averaged.

    model   as it is called
    plain   the plain model, if that is another
    """

    def __init__(self, model: nn.Module, plain: nn.Module | None = None) -> None:
        self.model = model
        self._plain = model if plain is None else plain
        self._first: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Copies them."""
        self._first = {name: value.clone() for name, value in self.whole().items()}

    def rewind(self) -> None:
        """Copies them back."""
        with torch.no_grad():
            for name, value in self.whole().items():
                value.copy_(self._first[name])

    def whole(self) -> dict[str, Tensor]:
        """They themselves."""
        return {name: value.detach() for name, value in self._plain.named_parameters()}


# ------------------------------------------------------------------------------
# What the ranks of a benchmark tell each other between rounds.


class Control:
    """A backend over TCP of its own, which is idle while anything is timed."""

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
        found = [
            f"rank {rank}: {text}" if len(set(texts)) > 1 else text
            for texts in [self.gather(here)]
            for rank, text in enumerate(texts)
            if text
        ]
        return found[0] if found else ""

    def close(self) -> None:
        """Leave."""
        self._backend.close()
