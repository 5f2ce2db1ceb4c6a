"""Where tensors of a message lie: rows of a table, by which contenders differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.bench.operations import Operation

__all__ = ["MEMORIES", "Kind", "Memory", "kinds_for"]


class Kind(NamedTuple):
    """One way to give memory to a call.

    registered  what the backend's `empty` gives, instead of torch's
    fresh       the result comes in new memory, each time
    apart       the result goes into memory of its own, given with `into=`
    """

    registered: bool = False
    fresh: bool = False
    apart: bool = False


MEMORIES: Mapping[str, Kind] = MappingProxyType(
    {
        "ordinary": Kind(),
        "registered": Kind(registered=True),
        "fresh": Kind(fresh=True),
        "into": Kind(apart=True),
    }
)
"""`ordinary` and `registered` are in place, where an operation can be; else into given memory."""

_MESSAGES = frozenset({"ping_pong", "stream"})


def kinds_for(operation: Operation, asked: Sequence[str]) -> list[str]:
    """Which of the kinds asked for are different things for this operation."""
    if operation.source is None or operation.name == "copy":
        return ["ordinary"]
    names = [name for name in asked if not (operation.name in _MESSAGES and name == "fresh")]
    if not operation.in_place or operation.name in _MESSAGES:
        names = ["ordinary" if name == "into" else name for name in names]
    return list(dict.fromkeys(names))


class Memory:
    """Torch's own memory for messages of one size: all peers use the same, one after the other."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Tensor] = {}

    def empty(self, use: str, elements: int) -> Tensor:
        """As many float32 elements for this use ("source" or "out"), the same memory again."""
        key = (use, elements)
        if key not in self._held:
            self._held[key] = torch.zeros(elements)  # touched: no page is missing when it is timed
        return self._held[key]
