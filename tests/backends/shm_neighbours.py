"""Ranks that share memory, without engines: their commons, and windows of groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from phalanx.core.group import Group
from phalanx.transport.shm.control import Window
from phalanx.transport.shm.domain import Commons


@dataclass
class SomeEngine:
    """What a window wants to know of an engine."""

    rank: int


@dataclass
class SomeGroup:
    """What a window wants to know of a group."""

    engine: SomeEngine
    id: int
    ranks: tuple[int, ...]


@contextmanager
def neighbours(size: int) -> Iterator[list[Commons]]:
    """So many ranks of this process, which have met."""
    commons = [Commons(rank, size) for rank in range(size)]
    try:
        for rank, one in enumerate(commons):
            for other, there in enumerate(commons):
                if other != rank:
                    one.meet(other, os.getpid(), there.memory, there.rope)
        yield commons
    finally:
        for one in commons:
            one.close()


def make_window(commons: list[Commons], rank: int, ident: int = 0) -> Window:
    """A rank's window for a group of all."""
    ranks = tuple(range(len(commons)))
    window = commons[rank].window(cast("Group", SomeGroup(SomeEngine(rank), ident, ranks)))
    assert window is not None
    return window
