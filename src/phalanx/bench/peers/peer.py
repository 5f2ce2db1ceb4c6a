"""`Peer`: one library, as one rank of a benchmark sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.bench.control import Control
from phalanx.bench.exchange import Exchange
from phalanx.bench.memory import MEMORIES, Memory
from phalanx.bench.operations import Operation

__all__ = ["Binder", "Peer", "Place", "messages"]


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
