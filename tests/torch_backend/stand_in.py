"""A device for tensors, and a backend for it, where there is no GPU.

on_device(values)            a tensor that torch takes for one on "meta"; it has these values
"cpu:phalanx,meta:stand_in"  for `init_process_group`: Gloo for the values of such tensors
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

NAME = "stand_in"
DEVICE = torch.device("meta")
CPU = torch.device("cpu")


class DeviceTensor(Tensor):
    """A tensor on `DEVICE`, for torch. What is computed of it is one, too."""

    values: Tensor

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = {name: CPU if value == DEVICE else value for name, value in (kwargs or {}).items()}
        found = function(*values_of(args), **named)
        given = {id(each.values): each for each in args if isinstance(each, DeviceTensor)}
        return tree_map_only(
            Tensor, lambda t: given[id(t)] if id(t) in given else on_device(t), found
        )


def on_device(values: Tensor, device: str = "meta") -> DeviceTensor:
    """A tensor on the device, whose memory is that of `values`."""
    make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    tensor: DeviceTensor = make(DeviceTensor, values.shape, dtype=values.dtype, device=device)
    tensor.values = values
    return tensor


def values_of(arguments: Any) -> Any:
    """The same with the values of the device's tensors in their place."""
    return tree_map_only(DeviceTensor, lambda tensor: tensor.values, arguments)


def _wait_for_all(store: dist.Store, rank: int, size: int) -> None:
    """Return when all ranks are here: a Gloo that ends makes that of a rank that still connects
    fail. torch does the same after it has made Gloo."""
    store.set(f"made by {rank}", "")
    store.wait([f"made by {each}" for each in range(size)])


class StandInGroup(dist.ProcessGroup):
    """The backend. Making it blocks until all ranks do, as with Gloo; and it wants the messages of
    a batch together, as NCCL does.

    called   the methods that it was asked for, in order
    """

    supports_coalescing = True
    supports_splitting = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        _wait_for_all(store, rank, size)
        self.gloo = dist.ProcessGroup(store, rank, size)
        self.gloo._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        self.called: list[str] = []
        self.timeout = timeout
        self.batch: list[Callable[[], Any]] | None = None

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self.called.append(f"named {name}")

    _set_group_name = setGroupName

    def setGroupDesc(self, description: str) -> None:
        pass

    _set_group_desc = setGroupDesc

    def barrier(self, *options: Any, **named: Any) -> Any:
        self.called.append("barrier")
        return self.gloo.barrier()

    def allreduce_coalesced(self, *arguments: Any) -> Any:
        return self._together("allreduce_coalesced", *arguments)

    def _together(self, name: str, *arguments: Any) -> Any:
        self.called.append(name)

        def begin() -> Any:
            return getattr(self.gloo, name)(*values_of(arguments))

        return begin() if self.batch is None else self.batch.append(begin)

    def send(self, *arguments: Any) -> Any:
        return self._together("send", *arguments)

    def recv(self, *arguments: Any) -> Any:
        return self._together("recv", *arguments)

    def recv_anysource(self, *arguments: Any) -> Any:
        return self._together("recv_anysource", *arguments)

    def _start_coalescing(self, device: torch.device) -> None:
        self.called.append("_start_coalescing")
        self.batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        self.called.append("_end_coalescing")
        assert self.batch is not None
        *works, last = [begin() for begin in self.batch]
        self.batch = None
        for work in works:
            work.wait()
        return last

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device == DEVICE

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return on_device(torch.empty(size, dtype=dtype))

    def shutdown(self) -> None:
        self.called.append("shutdown")

    def abort(self) -> None:
        self.called.append("abort")


def _collective(name: str) -> Callable[..., Any]:
    def call(self: StandInGroup, *arguments: Any, **named: Any) -> Any:
        self.called.append(name)
        return getattr(self.gloo, name)(*values_of(arguments), **named)

    return call


for _name in (
    *("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter"),
    *("_allgather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single"),
):
    setattr(StandInGroup, _name, _collective(_name))

dist.Backend.register_backend(NAME, StandInGroup, devices=[])
