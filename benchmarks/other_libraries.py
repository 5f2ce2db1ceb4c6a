"""`phalanx bench` with more libraries: the same options, the same output.

    python benchmarks/other_libraries.py all_reduce --backends shm,deepspeed,mlx --sizes 8..1M
    mpirun -n 2 python benchmarks/other_libraries.py all_reduce --backends shm,mpi
    python benchmarks/other_libraries.py ddp fsdp --backends shm,gloo,alone+copies,alone+fully_shard

deepspeed, mlx, nccl and mpi are libraries; `stock+group-memory` is torch's `fully_shard` over
Phalanx, in memory of its group; `alone+copies` and `alone+fully_shard`, training steps
without communication, show what the machine can do.

A library that is not installed is left out, and the reason is given. This file is also the example
of how to measure a library of your own: subclass `Peer`, and give it a row of `PEERS`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from phalanx.cli.bench import bench_command
from phalanx.errors import DistributedError
from phalanx.ops.bench import peers
from phalanx.ops.bench.operations import TASKS, PreparedCall, TrainedModel, Wrap, replicated
from phalanx.ops.bench.peers import (
    Call,
    Peer,
    PeerRow,
    PeerTable,
    RankContext,
    TorchDistributed,
    fully_sharded_by_torch,
    lacks_mpirun,
    lacks_stock,
    make_group,
)
from phalanx.wire.memory import tensor_bytes

# ------------------------------------------------------------------------------
# DeepSpeed's all_reduce in shared memory, written in C++ with AVX: for inference on processors.
#
# It compiles itself when it is first used, which takes about a minute and a C++ compiler.


def lacks_deepspeed() -> str:
    """Why there is no such operation; empty if there may be."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed: pip install deepspeed ninja"
    if not (shutil.which("c++") or shutil.which("g++")):
        return "deepspeed compiles its operation, and there is no C++ compiler"
    return ""


class DeepSpeed(Peer):
    """`inference_all_reduce_`: a float32 sum in place, on ranks of one host, all of which spin."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        if len(set(context.backend.topology)) > 1:
            raise RuntimeError("its ranks have to share one host")
        beside = str(Path(sys.executable).parent)  # where pip puts ninja
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
        # The names of its shared memory are made of these.
        port = str(context.gather(secrets.randbelow(1 << 30))[0])
        names = {"LOCAL_SIZE": str(self.size), "MASTER_ADDR": "phalanx-bench", "MASTER_PORT": port}
        before = {name: os.environ.get(name) for name in names}
        try:
            os.environ.update(names)
            builders: Any = importlib.import_module("deepspeed.ops.op_builder.cpu")
            builders.ShareMemCommBuilder().load(verbose=False).initialize(self.size, self.rank)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        all_reduce = torch.ops.deepspeed.inference_all_reduce_
        self.does = {"all_reduce": lambda call: partial(all_reduce, call.source)}
        context.backend.barrier()  # everyone has it open: the names are not needed any more
        for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer*_phalanx-bench_{port}_*"):
            path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------
# MLX's collectives over its ring of TCP connections. Its arrays never change: results are new.

_FUNCTIONS = {"all_reduce": "all_sum", "all_gather": "all_gather"}


def lacks_mlx() -> str:
    """Why there is no MLX; empty if there may be."""
    for module in ("mlx", "numpy"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'mlx[cpu]' numpy"
    return ""


class Mlx(Peer):
    """`mx.distributed` with the backend `ring`, on this host's processor."""

    memories = frozenset({"fresh"})

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        if len(set(context.backend.topology)) > 1:
            raise RuntimeError("this benchmark starts it on one host only")
        mx: Any = importlib.import_module("mlx.core")
        with ExitStack() as stack:
            # It wants to be told every rank's port: one that was free just now.
            probe = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports = context.gather(probe.getsockname()[1])
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            json.dump([[f"127.0.0.1:{port}"] for port in ports], file)
            file.flush()
            probe.close()
            context.backend.barrier()
            os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"] = str(self.rank), file.name
            self._group: Any = mx.distributed.init(strict=True, backend="ring")
        self._mx: Any = mx
        self.does = dict.fromkeys(_FUNCTIONS, self._collective)  # which others have, too

    def _collective(self, call: PreparedCall) -> Call:
        """Evaluated at once, since an operation is a promise until someone needs it."""
        mx, group = self._mx, self._group
        function = getattr(mx.distributed, _FUNCTIONS[call.operation.name])
        numpy: Any = importlib.import_module("numpy")  # MLX brings it, Phalanx does not
        given: Any = None
        result: Any = None

        def load() -> None:
            nonlocal given
            given = mx.array(call.source.numpy())

        def once() -> None:
            nonlocal result
            result = function(given, group=group, stream=mx.cpu)
            mx.eval(result)

        def store() -> None:
            call.out = torch.from_numpy(numpy.array(result))

        call.load, call.store = load, store
        return once


# ------------------------------------------------------------------------------
# MPI, by way of mpi4py's calls on plain memory, under mpirun: it gives the ranks their places.


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
# NCCL, by way of torch.


def lacks_nccl() -> str:
    """Why there is no NCCL; empty if there is."""
    if not dist.is_available() or not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    return "" if torch.cuda.is_available() else "NCCL needs a CUDA device, and there is none"


class Nccl(TorchDistributed):
    """On a CUDA device for each rank of a host; its calls return before they are done."""

    def __init__(self, context: RankContext) -> None:
        topology, rank = context.backend.topology, context.backend.rank
        host = topology[rank]
        local_rank, there = topology[:rank].count(host), topology.count(host)
        if there > torch.cuda.device_count():
            raise RuntimeError(
                f"{there} ranks of a host need as many CUDA devices, and it has "
                f"{torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local_rank)
        self.device = f"cuda:{local_rank}"
        super().__init__("nccl", context)
        self.does = {name: bind for name, bind in self.does.items() if name not in TASKS}

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------
# torch's `fully_shard` in memory of the group's, by torch's option for that.


class FullyShard(Peer):
    """`fully_shard` over a group of torch's of that name."""

    def __init__(self, name: str, context: RankContext) -> None:
        super().__init__(context)
        self._name, self._context = name, context
        self._group: Any = None
        self.does = {"fsdp": self._fsdp}

    def wrap(self, module: nn.Module) -> TrainedModel:
        """Return the sharded model."""
        if self._group is None:  # most benchmarks do not ask for it
            self._group = make_group(self._name, self._context)
        return fully_sharded_by_torch(module, self._group)

    def _fsdp(self, call: PreparedCall) -> Call:
        return self.step(call, self.wrap)

    def close(self) -> None:
        """Leave the group; with the default group the others end, too."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class InGroupMemory(FullyShard):
    """The same, with buffers in memory of the group's."""

    def wrap(self, module: nn.Module) -> TrainedModel:
        """Return the sharded model."""
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 -- it takes half a second

        trained = super().wrap(module)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_allocate_memory_from_process_group_for_comm(True)
        return trained


# ------------------------------------------------------------------------------
# What bounds training steps on this machine: steps of one rank that hears of no other.


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


def lacks_fake() -> str:
    """Why torch has no group without communication; empty if it has."""
    with suppress(ImportError):
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        return ""
    return "this torch has no fake process group"


class FullyShardAlone(FullyShard):
    """`fully_shard` on torch's group without communication.

    It brings nothing of other ranks, so no result is right or wrong. After it, torch gathers the
    whole parameters of other `fully_shard`s over this group, too, as their meshes are equal: those
    results are reported as wrong. Measure them in a run of their own.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__("fake", context)

    def step(self, call: PreparedCall, wrap: Wrap, *, alone: bool = False) -> Call:
        """The step, whose parameters are this rank's shards."""

        def wrap_local(module: nn.Module) -> TrainedModel:
            trained = wrap(module)
            parameters: Any = trained.model.named_parameters()
            shards = {name: value.detach().to_local() for name, value in parameters}

            def restore(values: dict[str, Tensor]) -> None:
                for name, shard in shards.items():
                    shard.copy_(values[name])

            return trained._replace(whole=lambda: shards, restore=restore)

        once = super().step(call, wrap_local, alone=alone)
        call.is_checked, call.count_wrong = False, lambda calls: 0
        return once


# ------------------------------------------------------------------------------

SCRIPT = str(Path(__file__).resolve())
PEERS: PeerTable = {
    "deepspeed": PeerRow(DeepSpeed, lacks_deepspeed, script=SCRIPT),
    "mlx": PeerRow(Mlx, lacks_mlx, script=SCRIPT),
    "mpi": PeerRow(Mpi, lacks_mpirun, script=SCRIPT),
    "nccl": PeerRow(Nccl, lacks_nccl, script=SCRIPT),
    "stock+group-memory": PeerRow(partial(InGroupMemory, "phalanx"), lacks_stock, script=SCRIPT),
    "alone+copies": PeerRow(AloneWithCopies, script=SCRIPT),
    "alone+fully_shard": PeerRow(FullyShardAlone, lacks_fake, script=SCRIPT),
}
"""The ranks of the benchmark read this table, too: each runs this file, but not as a program."""


def main() -> None:
    """Run the command line of this process; exit codes are those of `phalanx bench`."""
    app = typer.Typer(
        add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
    )
    app.command()(bench_command)
    try:
        app(obj={**peers.PEERS, **PEERS})
    except DistributedError as error:
        sys.stderr.write(f"{Path(__file__).name}: {error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
