"""The measured libraries: their interface on one rank, `Peer`, and the table of them all.

    Phalanx              one of its own backends, by the names that `phalanx.init` knows
    TorchDistributed     torch.distributed over Gloo or Phalanx, with DDP and `fully_shard`
    Socket, Copy, Alone  the limits of this machine

To add one, subclass `Peer`, and give it a row of `PEERS`. `benchmarks/other_libraries.py` adds
some from outside.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
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
from phalanx.launch.environment import STORE_VARIABLE
from phalanx.launch.init import init
from phalanx.launch.store import listen_for_store
from phalanx.native.torch_formation import store_at
from phalanx.ops.bench.operations import (
    OPERATIONS,
    STEPS,
    TASKS,
    BenchOperation,
    PreparedCall,
    TrainedModel,
    TrainingStep,
    Wrap,
    elements_of,
    replicated,
    task_of,
)
from phalanx.optim import ShardedOptimizer
from phalanx.parallel import DDP
from phalanx.transport.tcp.addresses import address_toward
from phalanx.wire.control import Endpoint
from phalanx.wire.memory import tensor_bytes

T = TypeVar("T")
Call = Callable[[], object]
Move = Callable[[Tensor, int], object]  # send, or recv: of a tensor and a peer
Binder = Callable[[PreparedCall], Call]
"""Returns what does it once, in the memory of the call; may give the call its other functions."""


@dataclass(frozen=True)
class RankContext:
    """One rank of a benchmark: the parts to make peers from, and the ranks' exchanges."""

    backend: Backend  # over TCP, idle while anything is timed: for exchanges between rounds
    master: str  # a name of rank 0's host
    timeout: float  # seconds that a rank waits for another
    width: int = 0  # of the layers of a trained model; 0: the operation's own
    optimizer: str = "sgd"  # of a trained model
    # (use, elements, device) -> torch's memory, which all peers use, one after the other
    buffers: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank. Within an `attempt` that has failed elsewhere,
        raise: the failed rank calls no `gather`.
        """
        values, problem = self._exchange(value)
        if problem:
            raise _AttemptFailedError(problem)
        return values

    def problem(self, here: str) -> str:
        """Return the first rank's problem, on every rank; empty if no rank has one."""
        return self._exchange(None, here)[1]

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """Run it on every rank; return its result here, and the first rank's `problem`."""
        result, here = None, ""
        try:
            result = action()
        except _AttemptFailedError as failed:
            return None, str(failed)
        except Exception as error:
            here = f"{type(error).__name__}: {error}"
        return result, self.problem(here)

    def _exchange(self, value: Any, here: str = "") -> tuple[list[Any], str]:
        """Return every rank's value, and the first rank's problem."""
        values, texts = zip(*ours.all_gather_object((value, here), self.backend), strict=True)
        if len(set(texts)) == 1:
            return list(values), here
        first = next(rank for rank, text in enumerate(texts) if text)
        return list(values), f"rank {first}: {texts[first]}"


class _AttemptFailedError(Exception):
    """An attempt that has failed on another rank, as every rank knows."""


class Peer:
    """A library under test, made by a row of the table of peers, on every rank at one time."""

    does: Mapping[str, Binder]  # its operations: name -> function that makes a call of it
    # Its operation beside another one, if not the same: it shows the machine's limit.
    beside: Mapping[str, str] = MappingProxyType({})
    # Kinds that it can be given; without "ordinary", it uses these always.
    memories: frozenset[str] = frozenset({"ordinary"})
    device: str = "cpu"  # of the messages' memory

    def __init__(self, context: RankContext) -> None:
        self.rank, self.size = context.backend.rank, context.backend.world_size
        self.width, self.optimizer = context.width, context.optimizer
        self._buffers = context.buffers

    def algorithms(self, operation: BenchOperation) -> tuple[str, ...]:
        """Return the algorithms that can be requested by name: the same on every rank."""
        return ("auto",)

    def empty(self, elements: int) -> Tensor:
        """Return memory of the library's own kind, if it has such."""
        return torch.empty(elements)

    def finish(self) -> None:
        """Wait until the last call has arrived, if calls return before."""

    def close(self) -> None:
        """Leave the library in its former state, as far as possible."""

    def prepare(
        self, operation: BenchOperation, count: int, kind: str = "ordinary", algorithm: str = "auto"
    ) -> PreparedCall:
        """Return a call on messages of `count` bytes in this kind of memory."""
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

    def step(self, call: PreparedCall, wrap: Wrap, *, alone: bool = False) -> Call:
        """Return the training step of one rank, which trains with the others or by itself."""
        task = task_of(call.operation.name, self.width, self.optimizer)
        ranks = range(self.rank, self.rank + 1) if alone else range(self.size)
        step = TrainingStep(task, wrap, rank=self.rank, ranks=ranks)
        call.load, call.count_wrong = step.load, step.count_wrong
        call.own_steps = step.own_steps
        return step.call

    def messages(self, call: PreparedCall, send: Move, recv: Move) -> Call:
        """Return the messages between this rank and its neighbour.

        `ping_pong` goes there and back in one call. In a `stream` the even rank sends, and the
        other confirms when it has everything.
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
    """A backend, which it closes, with all collectives that can be measured on it."""

    def __init__(self, backend: Backend, context: RankContext) -> None:
        super().__init__(context)
        self.backend = backend
        self.memories = frozenset({"ordinary", "fresh", "into"})
        if any(context.gather(backend.registers_memory)):
            self.memories |= {"registered"}  # elsewhere `empty` gives torch's own

        def fully_sharded(module: nn.Module) -> TrainedModel:
            """Shard the model with FSDP: a unit is a layer."""
            model = FSDP(module, backend, strategy=ShardingStrategy.FULL_SHARD, unit=nn.Linear)
            return TrainedModel(model, model.full_state_dict, model.load_state_dict)

        messages = partial(self.messages, send=backend.send, recv=backend.recv)
        self.does = {
            **dict.fromkeys(COLLECTIVES, self._collective),
            "barrier": lambda _: backend.barrier,
            "ping_pong": messages,
            "stream": messages,
            "ddp": lambda call: self.step(call, partial(self._replicated, way=call.algorithm)),
            "fsdp": partial(self.step, wrap=fully_sharded),
        }

    def algorithms(self, operation: BenchOperation) -> tuple[str, ...]:
        """Return `auto`, and the names in the table of schedules that differ here; or `STEPS`."""
        if operation.name == "ddp":
            return ("auto", *STEPS)
        several_hosts = len(set(self.backend.topology)) > 1
        rows = COLLECTIVES.get(operation.name, {})
        return ("auto", *(name for name, row in rows.items() if several_hosts or not row.placed))

    def _replicated(self, module: nn.Module, *, way: str) -> TrainedModel:
        """Wrap the model in DDP, to be trained as `STEPS` has it, or plainly."""
        model = DDP(module, self.backend)
        trained = replicated(model, module)
        if way == "sharded":
            return trained._replace(optimizer=lambda factory: ShardedOptimizer(factory, model))
        if way == "step":

            def in_step(loss: Callable[[], Tensor]) -> None:
                with model.step(1) as step:
                    step.backward(loss())

            return trained._replace(passes=in_step)
        return trained

    def _collective(self, call: PreparedCall) -> Call:
        function = getattr(ours, call.operation.name + "_" * call.in_place)
        once = partial(function, call.source, self.backend, algorithm=call.algorithm)
        return once if call.in_place or call.fresh else partial(once, into=call.out)

    def empty(self, elements: int) -> Tensor:
        """Return memory that the backend sends without a copy."""
        return self.backend.empty(elements)

    def close(self) -> None:
        self.backend.close()


# ------------------------------------------------------------------------------
# torch.distributed over Gloo or Phalanx: its collectives, DDP and `fully_shard`.


def lacks_gloo() -> str:
    """Return why there is no Gloo; empty if there is."""
    here = dist.is_available() and dist.is_gloo_available()
    return "" if here else "this build of torch has no Gloo"


def lacks_stock() -> str:
    """Return why torch cannot run on Phalanx; empty if it can."""
    here = dist.is_available() and dist.is_backend_available("phalanx")
    return "" if here else "torch finds its backend `phalanx` where Phalanx is installed by pip"


class TorchDistributed(Peer):
    """torch's own collectives over "gloo" or "phalanx", and its training steps.

    The first one makes torch's default group, which must not exist before.
    """

    memories = frozenset({"ordinary", "fresh"})

    def __init__(self, name: str, context: RankContext) -> None:
        super().__init__(context)
        group = self._group = make_group(name, context)
        send, recv = partial(dist.send, group=group), partial(dist.recv, group=group)
        messages = partial(self.messages, send=send, recv=recv)
        ddp = partial(DistributedDataParallel, process_group=group)
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
            "ddp": partial(self.step, wrap=lambda module: replicated(ddp(module), module)),
            "fsdp": partial(self.step, wrap=partial(fully_sharded_by_torch, group=group)),
        }

    def _collective(self, call: PreparedCall) -> Call:
        operation, source = call.operation, call.source
        function = partial(self._functions[operation.name], group=self._group)
        given = [] if operation.in_place else [source]
        if not call.fresh:
            return partial(function, call.out, *given)
        elements = elements_of(operation.expected, self.size, call.n)

        def into_new() -> Tensor:
            in_place = operation.in_place
            result = source.clone() if in_place else torch.empty(elements, device=source.device)
            function(result, *given)
            return result

        return into_new

    def close(self) -> None:
        """Leave the group; with the default group the others end, too."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def make_group(name: str, context: RankContext) -> Any:
    """Return a process group of all ranks: torch's default group, if there is none yet."""
    wait = timedelta(seconds=context.timeout)
    if dist.is_initialized():
        return dist.new_group(backend=name, timeout=wait)
    rank, size = context.backend.rank, context.backend.world_size
    listener = listen_for_store(context.master, 0) if rank == 0 else None
    port = context.gather(listener.getsockname()[1] if listener is not None else 0)[0]
    store = store_at(rank, size, str(Endpoint(context.master, port)), context.timeout, listener)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=wait)
    return dist.group.WORLD


def fully_sharded_by_torch(module: nn.Module, group: Any) -> TrainedModel:
    """Apply torch's `fully_shard` as its documentation recommends: on each layer, then on all."""
    # Half a second, which only this measurement should wait for.
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)

    def shards() -> dict[str, Any]:
        return {name: value.detach() for name, value in module.named_parameters()}

    def restore(values: dict[str, Tensor]) -> None:
        for name, shard in shards().items():
            shard.copy_(distribute_tensor(values[name], mesh, shard.placements))

    return TrainedModel(module, lambda: {n: s.full_tensor() for n, s in shards().items()}, restore)


# ------------------------------------------------------------------------------
# The limits of this machine: a plain socket between two processes, a memory copy, and a training
# step without communication.

_ANY_PORT = 9  # nothing is sent there

MOVING = tuple(name for name, row in OPERATIONS.items() if row.moves)


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


# ------------------------------------------------------------------------------
# The table.


class PeerRow(NamedTuple):
    """One peer of the table below."""

    make: Callable[[RankContext], Peer]  # makes it, on every rank at the same time
    # Returns, without asking other ranks, why it cannot be here; empty: it may be.
    lacks: Callable[[], str] = lambda: ""
    ours: bool = False  # whether it is Phalanx
    script: str = ""  # the file that has the row in a mapping PEERS of its own; empty: this one


PeerTable = Mapping[str, PeerRow]


def _phalanx(name: str) -> PeerRow:
    return PeerRow(lambda on: Phalanx(init(name, timeout=on.timeout), on), ours=True)


def lacks_mpirun() -> str:
    """Return why MPI cannot be here; empty if it may be: its ranks are those of mpirun."""
    started = "MPI starts its own ranks: mpirun -n 2 phalanx bench ..."
    return started if STORE_VARIABLE in os.environ else ""


PEERS: PeerTable = MappingProxyType(
    {
        "shm": _phalanx("shm"),
        "hybrid": _phalanx("hybrid"),
        "tcp": _phalanx("tcp"),
        "phalanx-gloo": _phalanx("gloo"),
        "phalanx-mpi": _phalanx("mpi")._replace(lacks=lacks_mpirun),
        "stock": PeerRow(partial(TorchDistributed, "phalanx"), lacks_stock),
        "gloo": PeerRow(partial(TorchDistributed, "gloo"), lacks_gloo),
        "socket": PeerRow(Socket),
        "copy": PeerRow(Copy),
        "alone": PeerRow(Alone),
    }
)
"""`phalanx-gloo` is Phalanx over Gloo, `gloo` is Gloo itself; `stock` is torch.distributed over
Phalanx."""

MACHINE = ("socket", "copy", "alone")  # those that are no library, but what the machine can do
