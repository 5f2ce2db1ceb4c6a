"""Phalanx's own backends, by the names that `phalanx.init` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

import phalanx.collectives as ours
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.core.backend import Backend
from phalanx.launch.init import BACKENDS, init
from phalanx.parallel import DDP
from phalanx.tools.bench.operations import Exchange, Fresh, Operation
from phalanx.tools.bench.peers.peer import Binder, Peer, Place, Plain, messages
from phalanx.tools.bench.peers.training import Sharded, joint_step

_IN_PLACE: Mapping[str, Callable[..., Any]] = {
    "all_reduce": ours.all_reduce_,
    "broadcast": ours.broadcast_,
}
_APART: Mapping[str, Callable[..., Any]] = {
    "all_reduce": ours.all_reduce,
    "all_gather": ours.all_gather,
    "reduce_scatter": ours.reduce_scatter,
    "broadcast": ours.broadcast,
    "all_to_all": ours.all_to_all,
    "reduce": ours.reduce,
    "gather": ours.gather,
    "scatter": ours.scatter,
}


def lacks_backend(name: str) -> Callable[[], str]:
    """What says why there is no such backend; empty if there is one."""

    def problem() -> str:
        return "" if name in BACKENDS else f"this version of Phalanx has no backend {name!r}"

    return problem


def make_ours(name: str, place: Place) -> Ours:
    """The backend `name`, as a peer."""
    return Ours(init(name, timeout=place.timeout), place)


class Ours(Peer):
    """A backend, which it closes, with all that the collectives can do on it."""

    def __init__(self, backend: Backend, place: Place) -> None:
        super().__init__(place)
        self.backend = backend
        self.memories = frozenset({"ordinary", "fresh", "into"})
        if any(place.control.gather(self.backend.group.shared is not None)):
            self.memories |= {"registered"}  # elsewhere `empty` gives torch's own

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Everything."""
        return {
            **dict.fromkeys(_APART, self._collective),
            "barrier": self._barrier,
            "ddp": self._ddp,
            "fsdp": self._fsdp,
            "ping_pong": self._messages,
            "stream": self._messages,
        }

    def algorithms(self, operation: Operation) -> tuple[str, ...]:
        """`auto`, and those of the table of schedules that are different things here."""
        several = len(set(self.backend.topology)) > 1
        rows = COLLECTIVES.get(operation.name, {})
        return ("auto", *(name for name, row in rows.items() if several or not row.placed))

    def empty(self, elements: int) -> Tensor:
        """Memory that the backend sends without a copy."""
        return self.backend.empty(elements)

    def _collective(
        self,
        operation: Operation,
        source: Tensor | None,
        out: Tensor | None,
        fresh: bool,
        algorithm: str,
    ) -> Exchange:
        assert source is not None
        name = operation.name
        if fresh:
            make = partial(_APART[name], source, self.backend, algorithm=algorithm)
            return Fresh(operation, source, make)
        if out is source:
            call = partial(_IN_PLACE[name], source, self.backend, algorithm=algorithm)
            return Exchange(operation, source, out, call)
        into = partial(_APART[name], source, self.backend, into=out, algorithm=algorithm)
        return Exchange(operation, source, out, into)

    def _messages(self, operation: Operation, data: Tensor | None, *_: object) -> Exchange:
        send, recv = self.backend.send, self.backend.recv
        return messages(operation, data, self.rank, self.size, send, recv)

    def _ddp(self, operation: Operation, *_: object) -> Exchange:
        return joint_step(self, operation, lambda made: Plain(DDP(made, self.backend), made))

    def _fsdp(self, operation: Operation, *_: object) -> Exchange:
        return joint_step(self, operation, lambda made: Sharded(made, self.backend))

    def _barrier(self, operation: Operation, *_: object) -> Exchange:
        return Exchange(operation, None, None, self.backend.barrier)

    def close(self) -> None:
        """Leave the group."""
        self.backend.close()
