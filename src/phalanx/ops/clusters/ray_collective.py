"""`ray.util.collective` on Phalanx: collectives among actors, on CPU tensors and NumPy arrays.

    from ray.util.collective.backend_registry import register_collective_backend
    register_collective_backend("PHALANX", PhalanxGroup)  # in the driver, and in each actor

    every rank   puts its host and process into Ray's key-value store
    rank 0       listens; puts address and token
    the others   connect; then all remove their entries

Groups of one name do not meet if they are of different jobs of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from phalanx import collectives
from phalanx.core.backend import Backend
from phalanx.core.reduce_op import ReduceOp
from phalanx.errors import MisuseError, SizeMismatchError, UnsupportedObjectError
from phalanx.torch_backend.rendezvous import meet

try:
    import numpy as np
    import ray
    from ray.experimental import internal_kv
    from ray.util.collective import types
    from ray.util.collective.collective_group.base_collective_group import BaseGroup
except ImportError as error:
    raise ImportError(
        f"phalanx.ops.clusters.ray_collective needs Ray ({error}): pip install 'phalanx[ray]'"
    ) from error

MEETING = 60.0  # seconds that a rank waits for the others when a group is made
TIMEOUT = 1800.0  # of each call: as that of Ray's groups on Gloo
OPS: Mapping[Any, ReduceOp] = MappingProxyType(
    {getattr(types.ReduceOp, name): ReduceOp[name] for name in ("SUM", "PRODUCT", "MIN", "MAX")}
)


class PhalanxGroup(BaseGroup):  # type: ignore[misc] # mypy is run without Ray
    """One actor's membership of a group; Ray makes it, and calls its methods.

    Ray gives each tensor in a list of one. Results are put into these tensors. Errors are those of
    `phalanx.errors`, and name the rank to blame.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        store = _KeyValueStore(group_name)
        try:
            self._on = meet(store, rank, world_size, MEETING, op="init_collective_group")
            collectives.barrier(self._on)  # all have read their entries
        finally:
            store.remove()
        collectives.barrier(self._on)  # a group of the same name finds nothing of this one
        self._on.timeout = TIMEOUT

    @classmethod
    def backend(cls) -> str:
        return "PHALANX"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        self._on.close()

    def barrier(self, barrier_options: Any = types.BarrierOptions) -> None:
        """Wait until all ranks have called it."""
        collectives.barrier(self._on)

    def allreduce(self, tensor: list[Any], allreduce_options: Any = types.AllReduceOptions) -> None:
        """Reduce in place, on every rank."""
        op = OPS[allreduce_options.reduceOp]
        collectives.all_reduce_(_written(tensor, self._on, "allreduce"), self._on, op)

    def reduce(self, tensor: list[Any], reduce_options: Any = types.ReduceOptions) -> None:
        """Reduce in place on the root; the others' tensors stay as they are."""
        root, op = reduce_options.root_rank, OPS[reduce_options.reduceOp]
        if self._rank == root:
            into = _written(tensor, self._on, "reduce")
            collectives.reduce(into, self._on, root, op, into=into)
        else:
            collectives.reduce(_read(tensor, self._on, "reduce"), self._on, root, op)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = types.BroadcastOptions) -> None:
        """Copy the root's tensor into all others."""
        root = broadcast_options.root_rank
        view = _read if self._rank == root else _written
        collectives.broadcast_(view(tensor, self._on, "broadcast"), self._on, root)

    def allgather(
        self,
        tensor_list: list[list[Any]],
        tensor: list[Any],
        allgather_options: Any = types.AllGatherOptions,
    ) -> None:
        """Put rank i's tensor into the i-th of the list, on every rank."""
        given = _read(tensor, self._on, "allgather")
        into = [_written([each], self._on, "allgather") for each in tensor_list[0]]
        _check_alike(into, given, self._on, "allgather")
        gathered = collectives.all_gather(given, self._on)
        for out, part in zip(into, gathered.view(self._world_size, *given.shape), strict=True):
            out.copy_(part)

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: Any = types.ReduceScatterOptions,
    ) -> None:
        """Put the reduction of all ranks' i-th tensors into that of rank i."""
        into = _written(tensor, self._on, "reducescatter")
        given = [_read([each], self._on, "reducescatter") for each in tensor_list[0]]
        _check_alike(given, into, self._on, "reducescatter")
        op = OPS[reducescatter_options.reduceOp]
        into.copy_(collectives.reduce_scatter(torch.stack(given), self._on, op)[0])

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send a tensor to a rank, which calls `recv`."""
        collectives.send(_read(tensor, self._on, "send"), self._on, send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive a tensor from a rank, of the same size."""
        collectives.recv(_written(tensor, self._on, "recv"), self._on, recv_options.src_rank)


# ------------------------------------------------------------------------------
# Tensors and arrays.


def _read(tensor: list[Any], on: Backend, op: str) -> Tensor:
    """Return Ray's tensor, or a NumPy array's memory as one; it is not written to."""
    (given,) = tensor
    if isinstance(given, Tensor):
        return given
    if isinstance(given, np.ndarray):  # torch warns of those that must not be written
        return torch.from_numpy(given if given.flags.writeable else given.copy())
    raise UnsupportedObjectError(
        f"rank {on.rank}: {op} takes CPU tensors and NumPy arrays, not {type(given).__name__}",
        rank=on.rank,
        op=op,
    )


def _written(tensor: list[Any], on: Backend, op: str) -> Tensor:
    """Return the same, to be written to. `MisuseError` for an array that is read-only."""
    (given,) = tensor
    if isinstance(given, np.ndarray) and not given.flags.writeable:
        raise MisuseError(
            f"rank {on.rank}: {op} writes to the array that it is given, and this one is "
            "read-only, as those are that come from Ray's object store: give a .copy()",
            rank=on.rank,
            op=op,
        )
    return _read(tensor, on, op)


def _check_alike(tensors: list[Tensor], one: Tensor, on: Backend, op: str) -> None:
    for number, each in enumerate(tensors):
        if (each.shape, each.dtype) != (one.shape, one.dtype):
            raise SizeMismatchError(
                f"rank {on.rank}: {op} takes tensors of one shape and dtype, and number {number} "
                f"of the list is {each.dtype} {list(each.shape)}, the other one {one.dtype} "
                f"{list(one.shape)}",
                rank=on.rank,
                op=op,
            )


# ------------------------------------------------------------------------------
# The rendezvous.


class _KeyValueStore:
    """Ray's key-value store, with the methods of torch's that a rendezvous needs.

    Each rank removes its keys after the rendezvous, so that each one is the first there.
    """

    def __init__(self, group_name: str) -> None:
        self.host, self.port = ray.util.get_node_ip_address(), 0  # toward the other ranks
        self._prefix = f"phalanx/{ray.get_runtime_context().get_job_id()}/{group_name}"
        self._own: set[str] = set()

    def add(self, key: str, more: int) -> int:
        """Return the number of rendezvous so far."""
        return more

    def set(self, key: str, value: str) -> None:
        self._own.add(key)
        internal_kv._internal_kv_put(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        return bytes(internal_kv._internal_kv_get(f"{self._prefix}/{key}"))

    def check(self, keys: list[str]) -> bool:
        return all(internal_kv._internal_kv_exists(f"{self._prefix}/{key}") for key in keys)

    def remove(self) -> None:
        for key in self._own:
            internal_kv._internal_kv_del(f"{self._prefix}/{key}")
