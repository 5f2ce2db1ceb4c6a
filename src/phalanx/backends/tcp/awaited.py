"""What the reactor is run for: until something is done."""

from __future__ import annotations

from typing import Protocol

from phalanx.backends.engine import Operation
from phalanx.backends.tcp.mesh import Mesh


class Awaited(Protocol):
    """Something that will be done."""

    @property
    def done(self) -> bool:
        """Whether it is."""
        ...


class NothingLeft:
    """Until no operation is outstanding in the background."""

    def __init__(self, operations: set[Operation]) -> None:
        self._operations = operations

    @property
    def done(self) -> bool:
        """Whether none is."""
        return not self._operations


class AllSent:
    """Until everything has left this host."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def done(self) -> bool:
        """Whether it has."""
        return self._mesh.all_sent()
