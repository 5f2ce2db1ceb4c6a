"""`torch.distributed` over Gloo: what most programs on processors use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.exchange import Exchange, Fresh
from phalanx.bench.operations import Operation
from phalanx.bench.peers.learner import Plain
from phalanx.bench.peers.peer import Binder, Peer, Place, messages
from phalanx.bench.peers.sharding import FullyShard
from phalanx.bench.peers.training import joint_step
from phalanx.launch.store import hold_store

__all__ = ["Gloo", "join_gloo", "lacks_gloo"]

_TWO: Mapping[str, Callable[[Tensor, Tensor], object]] = MappingProxyType(
    {
        "all_gather": dist.all_gather_into_tensor,
        "reduce_scatter": dist.reduce_scatter_tensor,
        "all_to_all": dist.all_to_all_single,
    }
)
"""Of (out, source)."""

_IN_PLACE: Mapping[str, Callable[[Tensor], object]] = MappingProxyType(
    {"all_reduce": dist.all_reduce, "broadcast": partial(dist.broadcast, src=0)}
)


def lacks_gloo() -> str:
    """Why there is no Gloo; empty if there is."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "this build of torch has no Gloo"
    return ""


def join_gloo(place: Place) -> None:
    """Make torch's default group, over Gloo, of all ranks. Nobody else may have made it."""
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    wait = timedelta(seconds=place.timeout)
    open_to_all: Any = partial(tcp_store, place.master, timeout=wait, wait_for_workers=False)
    store: Any = None
    if place.rank == 0:
        store, _ = hold_store(place.master, 0, timeout=place.timeout)
        # None: its name means loopback on this host alone, and other hosts have to come by.
        store = store or open_to_all(0, is_master=True)
    port = place.control.from_root(store.port if store is not None else 0)
    if store is None:
        store = open_to_all(port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.size, timeout=wait
    )


class Gloo(Peer):
    """Its own collectives, as torch offers them."""

    memories = frozenset({"ordinary", "fresh"})

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        join_gloo(place)

    @property
    def binders(self) -> Mapping[str, Binder]:
        """What torch does over Gloo."""
        return {
            **dict.fromkeys(_IN_PLACE, self._in_place),
            **dict.fromkeys(_TWO, self._two),
            "barrier": self._barrier,
            "ddp": self._ddp,
            "fsdp": self._fsdp,
            "ping_pong": self._messages,
            "stream": self._messages,
        }

    def _in_place(
        self, operation: Operation, source: Tensor | None, out: Tensor | None, fresh: bool, _: str
    ) -> Exchange:
        assert source is not None
        function = _IN_PLACE[operation.name]
        if not fresh:
            return Exchange(operation, source, out, partial(function, source))

        def copy_of(source: Tensor) -> Tensor:
            result = source.clone()
            function(result)
            return result

        return Fresh(operation, source, partial(copy_of, source))

    def _two(
        self, operation: Operation, source: Tensor | None, out: Tensor | None, fresh: bool, _: str
    ) -> Exchange:
        assert source is not None
        function = _TWO[operation.name]
        if not fresh:
            assert out is not None
            return Exchange(operation, source, out, partial(function, out, source))
        whole = source.numel() * (1 if operation.source else self.size)
        elements = operation.elements(operation.out, self.size, whole)

        def into_new(source: Tensor) -> Tensor:
            result = torch.empty(elements)
            function(result, source)
            return result

        return Fresh(operation, source, partial(into_new, source))

    def _messages(self, operation: Operation, data: Tensor | None, *_: object) -> Exchange:
        return messages(operation, data, self.rank, self.size, dist.send, dist.recv)

    def _ddp(self, operation: Operation, *_: object) -> Exchange:
        return joint_step(self, operation, lambda made: Plain(DistributedDataParallel(made), made))

    def _fsdp(self, operation: Operation, *_: object) -> Exchange:
        return joint_step(self, operation, lambda made: FullyShard(made, self.size))

    def _barrier(self, operation: Operation, *_: object) -> Exchange:
        return Exchange(operation, None, None, dist.barrier)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
