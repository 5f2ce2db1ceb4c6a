"""`ProcessGroupLibrary`: a process group of torch's, as a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.backends.library.kinds import GroupKind
from phalanx.backends.library.library import Abilities, Handle, Library
from phalanx.backends.library.started import START
from phalanx.backends.library.works import CollectiveWork, MessageWork, StreamWork, Waiters
from phalanx.backends.native import Call
from phalanx.errors import UnsupportedOperationError

ProcessGroup = Any  # torch.distributed.ProcessGroup, or one of its backends
END_WITHIN = 1.0  # seconds for each thread that waited for a message, once the group is at its end


class Former(Protocol):
    """Makes groups of some of the ranks."""

    def form(self, members: Sequence[int], ident: int, timeout: float) -> ProcessGroup:
        """The group of these ranks; `ident` says which. Blocks until all of them form it."""
        ...

    def stop(self) -> None:
        """Let go whoever waits for others to form a group."""
        ...


class ProcessGroupLibrary(Library):
    """A process group of torch's.

    kinds   for each kind of device, what such groups can do
    owned   whether it was made here: then it is ended here, too
    former  makes groups of some of the ranks; None where that cannot be
    """

    def __init__(
        self,
        group: ProcessGroup,
        kinds: Mapping[str, GroupKind],
        *,
        owned: bool,
        former: Former | None = None,
    ) -> None:
        super().__init__()
        self.name = " and ".join(dict.fromkeys(kind.title for kind in kinds.values()))
        self.rank, self.size = group.rank(), group.size()
        self.can = Abilities(
            devices=frozenset(kinds),
            subgroups=former is not None,
            ordered=any(kind.on_stream for kind in kinds.values()),
            calls_back=True,
        )
        self._group = group
        self._kinds = kinds
        self._on_cpu = kinds.get("cpu")
        self._first_kind = next(iter(kinds.values()))
        self._owned = owned
        self._former = former
        self._waiters = Waiters(f"phalanx rank {self.rank}: {self.name}", self._tell)
        self._ended = False

    def _kind(self, call: Call) -> GroupKind | None:
        tensor = call.source if call.source is not None else call.out
        if tensor is None:
            return self._first_kind
        return self._on_cpu if tensor.is_cpu else self._kinds.get(tensor.device.type)

    def _tell(self) -> None:
        self.news()

    @override
    def has(self, call: Call) -> bool:
        kind = self._kind(call)
        return kind is not None and kind.has(call)

    @override
    def collective(self, call: Call) -> Handle:
        kind = self._kind(call)
        assert kind is not None
        work, finish = START[call.collective](self._group, call, kind)
        return (StreamWork if kind.on_stream else CollectiveWork)(work, finish)

    @override
    def send(self, view: memoryview, peer: int, tag: int) -> Handle:
        tensor = _as_tensor(view)
        handle = MessageWork(tensor)
        self._waiters.wait_for(handle, self._group.send([tensor], peer, tag))
        return handle

    @override
    def recv(self, view: memoryview, peer: int, tag: int) -> Handle:
        tensor = _as_tensor(view)
        handle = MessageWork(tensor)
        self._waiters.wait_for(handle, self._group.recv([tensor], peer, tag))
        return handle

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        if self._former is None:
            raise UnsupportedOperationError(
                f"rank {self.rank}: this process group has no store through which some of its "
                "ranks could form one of their own",
                rank=self.rank,
            )
        group = self._former.form(members, ident, timeout)
        return ProcessGroupLibrary(group, self._kinds, owned=True)

    @override
    def close(self) -> None:
        if self._former is not None:
            self._former.stop()
        self.abort()
        if self._owned:
            self._waiters.end(END_WITHIN)
            with suppress(RuntimeError):
                self._group.shutdown()
        self._group = None

    @override
    def abort(self) -> None:
        if self._ended or not self._owned:
            return
        self._ended = True
        for kind in self._kinds.values():
            if kind.break_off is not None:
                kind.break_off(self._group)


def _as_tensor(view: memoryview) -> Tensor:
    """The bytes as a tensor. Torch warns of read-only memory, which is only read here: a copy."""
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
