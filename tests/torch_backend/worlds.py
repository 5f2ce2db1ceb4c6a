"""Ranks as threads of this process, each with a world of torch.distributed of its own.

`run(fn, size)` calls `fn(rank)` on every rank, where `torch.distributed` is initialized with
"phalanx": torch keeps what belongs to a world in one global, which is one for each thread here. The
ranks meet through a store, as processes do, and are connected by shared memory or TCP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from _pytest.monkeypatch import MonkeyPatch
from clusters import TIMEOUT, Maker, Threads
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

import phalanx.torch_backend
from phalanx import Backend, HybridBackend, TcpBackend
from phalanx.launch.environment import World
from phalanx.torch_backend import rendezvous

T = TypeVar("T")


class TorchWorld(Threads):
    """A world of torch.distributed."""

    name = "torch"

    def __init__(self, backend: str = "phalanx") -> None:
        self.backend = backend

    def makers(self, size: int, timeout: float) -> list[Maker]:
        store = dist.HashStore()

        def maker(rank: int) -> Maker:
            def make() -> Backend:
                dist.init_process_group(
                    self.backend,
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout),
                )
                return dist.group.WORLD.backend  # type: ignore[union-attr]

            return make

        return [maker(rank) for rank in range(size)]


def run(
    fn: Callable[[int], T],
    size: int = 2,
    *,
    timeout: float = TIMEOUT,
    kind: str = "auto",
    backend: str = "phalanx",
) -> list[T]:
    """`fn(rank)` on every rank; the results in rank order.

    kind     "auto" is shared memory; "tcp"; "hybrid" has ranks with odd numbers on another host
    backend  what torch is asked for
    """
    phalanx.torch_backend.register()

    def make_backend(name: str, world: World, seconds: float) -> Backend:
        return {"tcp": TcpBackend, "hybrid": HybridBackend}[kind](
            world.rank,
            world.world_size,
            world.address,
            token=world.token,
            timeout=seconds,
            listener=world.listener,
            host="odd" if world.rank % 2 else "even",
        )

    with world_of_each_thread(), MonkeyPatch.context() as patch:
        if kind != "auto":
            patch.setattr(rendezvous, "make_backend", make_backend)
        return TorchWorld(backend).run(lambda backend: fn(backend.rank), size, timeout=timeout)


def run_gloo(fn: Callable[[int], T], size: int) -> list[T]:
    """The same with Gloo: what it gives is what others are compared with."""
    store = dist.HashStore()

    def act(rank: int) -> T:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        try:
            return fn(rank)
        finally:
            dist.destroy_process_group()

    with world_of_each_thread(), ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, range(size)))


@contextmanager
def world_of_each_thread() -> Iterator[None]:
    world, hook = c10d._world, sys.excepthook
    c10d._world = ThreadLocalWorld()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        c10d._world, sys.excepthook = world, hook
        # torch's DDP saves and restores it, which threads do at the same time.
        DistributedDataParallel._active_ddp_module = None
