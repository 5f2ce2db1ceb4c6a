"""torch.distributed over Gloo, NCCL or Phalanx: its collectives, DDP and `fully_shard`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.launch.store import listen_for_store
from phalanx.native.torch_formation import store_at
from phalanx.ops.bench.operations import PreparedCall, TrainedModel, elements_of, replicated
from phalanx.ops.bench.peer import Call, Peer, RankContext
from phalanx.wire.control import Endpoint


def lacks_gloo() -> str:
    """Why there is no Gloo; empty if there is."""
    here = dist.is_available() and dist.is_gloo_available()
    return "" if here else "this build of torch has no Gloo"


def lacks_nccl() -> str:
    """Why there is no NCCL; empty if there is."""
    if not dist.is_available() or not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    return "" if torch.cuda.is_available() else "NCCL needs a CUDA device, and there is none"


def lacks_stock() -> str:
    """Why torch cannot run on Phalanx; empty if it can."""
    here = dist.is_available() and dist.is_backend_available("phalanx")
    return "" if here else "torch finds its backend `phalanx` where Phalanx is installed by pip"


def lacks_fake() -> str:
    """Why torch has no group without communication; empty if it has."""
    with suppress(ImportError):
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        return ""
    return "this torch has no fake process group"


class TorchDistributed(Peer):
    """torch's own collectives over "gloo", "nccl" or "phalanx", and its training steps on CPUs.

    The first one makes torch's default group, which nobody else may have made. NCCL's memory is on
    a CUDA device, one a rank of this host, and its calls return before they are done.
    """

    memories = frozenset({"ordinary", "fresh"})

    def __init__(self, name: str, context: RankContext) -> None:
        super().__init__(context)
        if name == "nccl":
            topology = context.backend.topology
            host = topology[self.rank]
            local_rank, there = topology[: self.rank].count(host), topology.count(host)
            if there > torch.cuda.device_count():
                raise RuntimeError(
                    f"{there} ranks of a host need as many CUDA devices, and it has "
                    f"{torch.cuda.device_count()}"
                )
            torch.cuda.set_device(local_rank)
            self.device = f"cuda:{local_rank}"
        group = self._group = _make_group(name, context)
        send, recv = partial(dist.send, group=group), partial(dist.recv, group=group)
        messages = partial(self.messages, send=send, recv=recv)
        self._functions: dict[str, Callable[..., object]] = {
            "all_reduce": dist.all_reduce,
            "broadcast": partial(dist.broadcast, src=0),
            "all_gather": dist.all_gather_into_tensor,
            "reduce_scatter": dist.reduce_scatter_tensor,
            "all_to_all": dist.all_to_all_single,
        }
        self.does = {
            **dict.fromkeys(self._functions, self._collective),
            "barrier": lambda _: partial(dist.barrier, group),
            "ping_pong": messages,
            "stream": messages,
        }
        if self.device == "cpu":
            ddp = partial(DistributedDataParallel, process_group=group)
            self.does |= {
                "ddp": partial(self.step, wrap=lambda module: replicated(ddp(module), module)),
                "fsdp": partial(self.step, wrap=partial(fully_sharded_by_torch, group=group)),
            }

    def _collective(self, call: PreparedCall) -> Call:
        operation, source = call.operation, call.source
        function = partial(self._functions[operation.name], group=self._group)
        if not call.fresh:
            return partial(function, call.out, *([] if operation.in_place else [source]))
        elements = elements_of(operation.expected, self.size, call.n)

        def into_new() -> Tensor:
            if operation.in_place:
                result = source.clone()
                function(result)
            else:
                result = torch.empty(elements, device=source.device)
                function(result, source)
            return result

        return into_new

    def finish(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the group; with the default group the others end, too."""
        _leave_group(self._group)


class FullyShard(Peer):
    """`fully_shard` over a group of torch's of that name.

    With `group_memory` in memory of the group's, by torch's option for that. "fake" is torch's
    group without communication: it brings nothing of other ranks, so no result is right or wrong.
    """

    def __init__(self, name: str, context: RankContext, *, group_memory: bool = False) -> None:
        super().__init__(context)
        self._name, self._context, self._group_memory = name, context, group_memory
        self._group: Any = None
        self.does = {"fsdp": self._fsdp}

    def _fsdp(self, call: PreparedCall) -> Call:
        if self._group is None:  # most benchmarks do not ask for it
            self._group = _make_group(self._name, self._context)
        once = self.step(call, self._wrap)
        if self._name == "fake":
            call.is_checked, call.count_wrong = False, lambda calls: 0
        return once

    def _wrap(self, module: nn.Module) -> TrainedModel:
        trained = fully_sharded_by_torch(module, self._group, group_memory=self._group_memory)
        if self._name != "fake":
            return trained
        parameters: Any = module.named_parameters()
        shards = {name: value.detach().to_local() for name, value in parameters}

        def restore(values: dict[str, Tensor]) -> None:
            for name, shard in shards.items():
                shard.copy_(values[name])

        return trained._replace(whole=lambda: shards, restore=restore)

    def close(self) -> None:
        """Leave the group; with the default group the others end, too."""
        if self._group is not None:
            _leave_group(self._group)


def _make_group(name: str, context: RankContext) -> Any:
    """A process group of all ranks: torch's default group, if there is none yet."""
    wait = timedelta(seconds=context.timeout)
    if dist.is_initialized():
        return dist.new_group(backend=name, timeout=wait)
    rank, size = context.backend.rank, context.backend.world_size
    listener = listen_for_store(context.master, 0) if rank == 0 else None
    port = context.gather(listener.getsockname()[1] if listener is not None else 0)[0]
    store = store_at(rank, size, str(Endpoint(context.master, port)), context.timeout, listener)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=wait)
    return dist.group.WORLD


def _leave_group(group: Any) -> None:
    if dist.is_initialized():
        dist.destroy_process_group(group)


def fully_sharded_by_torch(
    module: nn.Module, group: Any, *, group_memory: bool = False
) -> TrainedModel:
    """Torch's `fully_shard`, as its documentation recommends: on each layer, then on the whole."""
    # Half a second, which only this measurement should wait for.
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    if group_memory:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_allocate_memory_from_process_group_for_comm(True)

    def shards() -> dict[str, Any]:
        return {name: value.detach() for name, value in module.named_parameters()}

    def restore(values: dict[str, Tensor]) -> None:
        for name, shard in shards().items():
            shard.copy_(distribute_tensor(values[name], mesh, shard.placements))

    return TrainedModel(module, lambda: {n: s.full_tensor() for n, s in shards().items()}, restore)
