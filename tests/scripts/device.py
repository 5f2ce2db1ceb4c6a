"""Tensors on a device: collectives, messages, DDP and FSDP give there what they give on the CPU.

    python tests/scripts/device.py [--ranks N] [--only PART]

The device is the accelerator that torch finds; or, where the package `torch_openreg` of torch's own
tests is installed, its simulated one, which has streams. Ranks share devices where there are fewer.

    collectives  every form of every collective, and messages, over tcp, shm and hybrid, of several
                 sizes and dtypes: bit for bit as with CPU tensors
    order        what a stream was given before a collective is in it, and its result is there for
                 what the stream is given next, though nobody waits for the device
    training     DDP, and FSDP of every strategy, over tcp and shm: the parameters of plain training
    script       a whole training script of uneven micro-batches: `step`, `BatchSampler`,
                 `ShardedOptimizer`, clipping, a checkpoint and another model that goes on from it,
                 `GradScaler` under autocast, `mean`: what one process comes to on that device
    torch        `init_process_group("cpu:phalanx,cuda:nccl")` and the other order: collectives,
                 messages, groups and torch's DDP, of tensors on both. Ranks with a GPU each
    nccl         NCCL by way of `TorchBackend`, beside torch.distributed on the same group, in
                 rounds that take turns: at least 99 % of its bandwidth. Two GPUs and more

Each part prints N of N, or says why it was skipped. Without any device all are skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from clusters import Cluster, Hybrid, SharedMemory, SubOf, Tcp, loopback_listener
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
import phalanx.torch_backend
from phalanx import (
    DDP,
    FSDP,
    Backend,
    ReduceOp,
    ShardingStrategy,
    TorchBackend,
    UnsupportedOperationError,
    spawn,
)

SIMULATED = "torch_openreg"
if importlib.util.find_spec(SIMULATED) is not None:  # before a backend asks for the accelerator
    importlib.import_module(SIMULATED)

TIMEOUT = 60.0


def device_of(rank: int) -> torch.device:
    """The device of a rank; the CPU where there is no other."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, rank % torch.accelerator.device_count())


# ------------------------------------------------------------------------------
# Collectives and messages: the same calls of CPU tensors and of device tensors.

Call = Callable[[Tensor, Tensor, Backend], "Tensor | None"]
"""Of a tensor, of one with as many rows as there are ranks times its own, and the backend."""


def into_columns(tensor: Tensor, whole: Tensor, backend: Backend) -> Tensor:
    """A result in memory that is not contiguous."""
    columns = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    phalanx.all_reduce(tensor, backend, into=columns[..., 1])
    return columns


def in_columns(tensor: Tensor, whole: Tensor, backend: Backend) -> Tensor:
    columns = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    columns[..., 0].copy_(tensor)
    phalanx.all_reduce_(columns[..., 0], backend)
    return columns


def several_under_way(tensor: Tensor, whole: Tensor, backend: Backend) -> Tensor:
    works = [phalanx.async_all_reduce(tensor, backend, label=str(n)) for n in range(3)]
    return works[2].wait() + works[0].wait() + works[1].wait()


def round_the_ring(tensor: Tensor, whole: Tensor, backend: Backend) -> Tensor:
    into = torch.zeros_like(tensor)
    rank, size = backend.rank, backend.world_size
    backend.sendrecv(tensor, (rank + 1) % size, into, (rank - 1) % size)
    return into


def from_any(tensor: Tensor, whole: Tensor, backend: Backend) -> Tensor:
    into = torch.zeros_like(tensor)
    if backend.rank == 0:
        works = [backend.isend(tensor, peer) for peer in range(1, backend.world_size)]
        for work in works:
            work.wait()
    else:
        backend.recv(into, None)
    return into


def coalesced(tensor: Tensor, whole: Tensor, backend: Backend) -> Tensor:
    return torch.cat(phalanx.all_reduce_coalesced([tensor, whole], backend))


CALLS: Mapping[str, Call] = MappingProxyType(
    {
        "all_reduce": lambda t, w, b: phalanx.all_reduce(t, b),
        "all_reduce, max": lambda t, w, b: phalanx.all_reduce(t, b, ReduceOp.MAX),
        "all_reduce, ring": lambda t, w, b: phalanx.all_reduce(t, b, algorithm="ring"),
        "all_reduce, reproducible": lambda t, w, b: phalanx.all_reduce(t, b, reproducible=True),
        "all_reduce_": lambda t, w, b: phalanx.all_reduce_(t.clone(), b),
        "all_reduce_ of columns": in_columns,
        "all_reduce into columns": into_columns,
        "async_all_reduce": several_under_way,
        "all_reduce_coalesced": coalesced,
        "reduce": lambda t, w, b: phalanx.reduce(t, b, root=1),
        "reduce_scatter": lambda t, w, b: phalanx.reduce_scatter(w, b),
        "broadcast": lambda t, w, b: phalanx.broadcast(t, b, root=1),
        "broadcast_": lambda t, w, b: phalanx.broadcast_(t.clone(), b),
        "all_gather": lambda t, w, b: phalanx.all_gather(t, b),
        "gather": lambda t, w, b: phalanx.gather(t, b),
        "scatter": lambda t, w, b: phalanx.scatter(w, b, root=1),
        "all_to_all": lambda t, w, b: phalanx.all_to_all(w, b),
        "all_to_all_uneven": lambda t, w, b: phalanx.all_to_all_uneven(
            w, b, [len(t)] * b.world_size, [len(t)] * b.world_size
        ),
        "sendrecv": round_the_ring,
        "recv from any": from_any,
    }
)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float8_e5m2)
SIZES = (0, 1, 1001, 2_500_003)  # elements; the last one takes three pieces of float32
CLUSTERS: tuple[Cluster, ...] = (Tcp(), SharedMemory(), Hybrid(), SubOf(Tcp()))


def compare_calls(backend: Backend) -> tuple[int, list[str]]:
    """How many calls gave on the device what they gave on the CPU, and which did not."""
    device, rank, right, wrong = device_of(backend.rank), backend.rank, 0, []
    for size in SIZES:
        for dtype in DTYPES if size <= 1001 else DTYPES[:1]:
            values = (torch.arange(size) % 7 + rank).to(torch.float32)
            tensor = values.to(dtype)
            whole = torch.cat([values + k for k in range(backend.world_size)]).to(dtype)
            for name, call in CALLS.items():
                expected = outcome(call, tensor, whole, backend)
                if is_equal(
                    outcome(call, tensor.to(device), whole.to(device), backend), expected, device
                ):
                    right += 1
                else:
                    wrong.append(f"{name} of {size} {dtype} on rank {rank}")
    return right, wrong


def outcome(call: Call, tensor: Tensor, whole: Tensor, backend: Backend) -> Tensor | str | None:
    """What a call gives; or that it is refused, as a sum of float8 is, on every device."""
    try:
        return call(tensor, whole, backend)
    except UnsupportedOperationError as error:
        return type(error).__name__


def is_equal(
    came: Tensor | str | None, expected: Tensor | str | None, device: torch.device
) -> bool:
    if not isinstance(came, Tensor) or not isinstance(expected, Tensor):
        return came == expected
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (came.cpu(), expected)]
    return came.device == device and torch.equal(*bits)


def collectives(ranks: int) -> Iterator[tuple[str, int, list[str]]]:
    for cluster in CLUSTERS:
        for size in {2, ranks}:
            results = cluster.run(compare_calls, size, timeout=TIMEOUT)
            wrong = [each for _, wrong in results for each in wrong]
            yield f"{cluster}, {size} ranks", sum(right for right, _ in results), wrong


# ------------------------------------------------------------------------------
# Order: nobody waits for the device.


def keep_order(backend: Backend) -> tuple[int, list[str]]:
    """What is computed on the device, before, between and after collectives, and what comes out."""
    device, size, right, wrong = device_of(backend.rank), backend.world_size, 0, []
    for step in range(1, 11):
        values = torch.full((3 << 20,), float(step), device=device)
        for _ in range(20):  # so that the stream is behind when the collective is asked for
            values = values.clone()
        phalanx.all_reduce_(values, backend)
        once = values.clone()
        twice = once.clone()
        phalanx.async_all_reduce_(twice, backend).wait()
        for came, expected in ((once.clone(), step * size), (twice.clone(), step * size**2)):
            if bool((came == float(expected)).all()):
                right += 1
            else:
                wrong.append(f"step {step} on rank {backend.rank}")
    return right, wrong


def order(ranks: int) -> Iterator[tuple[str, int, list[str]]]:
    for name in ("tcp", "shm"):
        results = spawn(keep_order, ranks, name, timeout=TIMEOUT)
        wrong = [each for _, wrong in results for each in wrong]
        yield name, sum(right for right, _ in results), wrong


# ------------------------------------------------------------------------------
# Training: what plain training on the CPU comes to.

STEPS, BATCH, WIDTH = 5, 8, 64


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def inputs_of(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def train_alone(ranks: int) -> list[Tensor]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = torch.cat([inputs_of(step, rank) for rank in range(ranks)])
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(wrap: str, backend: Backend) -> list[Tensor]:
    device = device_of(backend.rank)
    torch.accelerator.set_device_index(device)
    model = model_of().to(device)
    wrapped: DDP | FSDP
    if wrap == "ddp":
        wrapped = DDP(model, backend)
    else:
        wrapped = FSDP(model, backend, strategy=getattr(ShardingStrategy, wrap))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(inputs_of(step, backend.rank).to(device)).pow(2).mean().backward()
        optimizer.step()
    if isinstance(wrapped, FSDP):
        return [value.cpu() for value in wrapped.full_state_dict().values()]
    return [p.detach().cpu() for p in model.parameters()]


def training(ranks: int) -> Iterator[tuple[str, int, list[str]]]:
    expected = train_alone(ranks)
    for name in ("tcp", "shm"):
        for wrap in ("ddp", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            right, wrong = 0, []
            results = spawn(partial(train, wrap), ranks, name, timeout=TIMEOUT)
            for rank, parameters in enumerate(results):
                pairs = zip(parameters, expected, strict=True)
                if all(torch.allclose(here, there, atol=1e-4) for here, there in pairs):
                    right += 1
                else:
                    wrong.append(f"parameters of rank {rank}")
            yield f"{wrap} over {name}", right, wrong


# ------------------------------------------------------------------------------
# A whole training script on the device, beside one process that has the joined batches.

SAMPLES, JOINED, HALF = 45, 13, 2  # an epoch is 4 steps, the last of 6 samples
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def samples_of(half: bool) -> TensorDataset:
    dtype = torch.float32 if half else torch.float64
    inputs = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(7), dtype=dtype)
    return TensorDataset(inputs, inputs[:, :4].abs())


def script(
    wrap: str, half: bool, folder: str, backend: Backend
) -> tuple[list[Tensor], list[float]]:
    """Two epochs; after a few steps another model goes on from a checkpoint."""
    device = device_of(backend.rank)
    torch.accelerator.set_device_index(device)
    data = samples_of(half)
    inputs, targets = (tensor.to(device) for tensor in data.tensors)
    sampler = phalanx.BatchSampler(SAMPLES, backend, batch_size=JOINED, seed=3)
    loader = DataLoader(data, batch_sampler=sampler, pin_memory=device.type == "cuda")
    scaler = phalanx.GradScaler(backend, device.type, init_scale=1024.0, enabled=half)

    def build() -> tuple[DDP | FSDP, torch.optim.Optimizer]:
        model = model_of().to(device, inputs.dtype)
        wrapped = (
            DDP(model, backend)
            if wrap == "DDP"
            else FSDP(model, backend, strategy=getattr(ShardingStrategy, wrap))
        )
        return wrapped, phalanx.ShardedOptimizer(torch.optim.AdamW, wrapped, lr=0.02)

    wrapped, optimizer = build()
    losses: list[float] = []
    for _ in range(2):
        for x, y in sampler.track(loader):
            parts = [*zip(x.split(2), y.split(2), strict=True)]
            with wrapped.step(len(x), micro_batches=len(parts)) as step:
                for some_x, some_y in parts:
                    with torch.autocast(device.type, torch.float16, enabled=half):
                        outputs = wrapped(some_x.to(device, non_blocking=True))
                    loss = (outputs - some_y.to(device, non_blocking=True)).pow(2).sum()
                    step.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            phalanx.clip_grad_norm_(wrapped, 1.0)
            scaler.step(optimizer)
            losses.append(step.loss / scaler.get_scale())
            scaler.update()
            optimizer.zero_grad()
            if len(losses) == HALF:
                state = {"model": wrapped, "optimizer": optimizer, "backend": backend}
                phalanx.save_checkpoint(folder, step=HALF, async_save=True, **state).wait()
                wrapped, optimizer = build()
                state = {"model": wrapped, "optimizer": optimizer, "backend": backend}
                phalanx.load_checkpoint(folder, **state)
    rows = list(range(backend.rank, SAMPLES, backend.world_size))
    with torch.no_grad():
        errors = (wrapped(inputs[rows]) - targets[rows]).pow(2).sum(1)
    losses.append(float(phalanx.mean(errors, backend)))
    values = wrapped.full_state_dict() if isinstance(wrapped, FSDP) else wrapped.module.state_dict()
    return [value.cpu() for value in values.values()], losses


def script_alone(half: bool, backend: Backend) -> tuple[list[Tensor], list[float]]:
    """What `script` comes to in one process, on the device, with torch alone."""
    device = device_of(0)
    inputs, targets = (tensor.to(device) for tensor in samples_of(half).tensors)
    model = model_of().to(device, inputs.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=half)
    losses: list[float] = []
    sampler = phalanx.BatchSampler(SAMPLES, backend, batch_size=JOINED, seed=3)
    for _ in range(2):
        for rows in sampler:
            with torch.autocast(device.type, torch.float16, enabled=half):
                outputs = model(inputs[rows])
            loss = (outputs - targets[rows]).pow(2).sum() / len(rows)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    with torch.no_grad():
        losses.append((model(inputs) - targets).pow(2).sum(1).mean().item())
    return [p.detach().cpu() for p in model.parameters()], losses


def whole_script(ranks: int) -> Iterator[tuple[str, int, list[str]]]:
    for half, within in ((False, 1e-9), (True, 2e-2)):
        expected, losses = phalanx.simulate(partial(script_alone, half), 1)[0]
        for name, wrap in itertools.product(("tcp", "shm"), ("DDP", "FULL_SHARD", "SHARD_GRAD_OP")):
            right, wrong = 0, []
            with tempfile.TemporaryDirectory() as folder:
                results = spawn(partial(script, wrap, half, folder), ranks, name, timeout=TIMEOUT)
            for rank, (parameters, seen) in enumerate(results):
                pairs = [
                    *zip(parameters, expected, strict=True),
                    (torch.tensor(seen), torch.tensor(losses)),
                ]
                far = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
                if far <= within:
                    right += 1
                else:
                    wrong.append(f"rank {rank}: off by {far:.1e}")
            what = "autocast and GradScaler" if half else "doubles"
            yield f"{wrap} over {name}, {what}", right, wrong


# ------------------------------------------------------------------------------
# torch.distributed, with a backend for each device.

BOTH_ORDERS = ("cpu:phalanx,cuda:nccl", "cuda:nccl,cpu:phalanx")


def use_both(port: int, names: str, backend: Backend) -> tuple[int, list[str]]:
    """How many calls gave what they should on the CPU and on this rank's device, and which not."""
    rank, size, device = backend.rank, backend.world_size, device_of(backend.rank)
    torch.accelerator.set_device_index(device)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(names, init_method=method, rank=rank, world_size=size)
    came: dict[str, bool] = {}
    for place in (torch.device("cpu"), device):

        def full(value: float, place: torch.device = place) -> Tensor:
            return torch.full((1000,), float(value), device=place)

        for what, group in (("world", None), ("group", dist.new_group(range(size)))):
            tensor, gathered = full(rank + 1), [full(-1) for _ in range(size)]
            dist.all_reduce(tensor, group=group)
            dist.all_gather(gathered, full(rank), group=group)
            came[f"all_reduce on {place.type}, {what}"] = bool(
                (tensor == size * (size + 1) / 2).all()
            )
            firsts = [each[0].item() for each in gathered]
            came[f"all_gather on {place.type}, {what}"] = firsts == list(range(size))
        found, right, left = full(-1), (rank + 1) % size, (rank - 1) % size
        if size > 1:
            sent = dist.P2POp(dist.isend, full(rank), right)
            for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, found, left)]):
                work.wait()
            came[f"batch_isend_irecv on {place.type}"] = bool((found == left).all())
        pairs = zip(train_torch(place), train_alone(size), strict=True)
        came[f"DDP on {place.type}"] = all(torch.allclose(*pair, atol=1e-4) for pair in pairs)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, rank)
    came["objects"] = objects == list(range(size))
    dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()
    return sum(came.values()), [f"{what} on rank {rank}" for what in came if not came[what]]


def train_torch(device: torch.device) -> list[Tensor]:
    """What `train` does, with torch's DDP."""
    wrapped = nn.parallel.DistributedDataParallel(model_of().to(device))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(inputs_of(step, dist.get_rank()).to(device)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in wrapped.parameters()]


def torch_groups(ranks: int) -> Iterator[tuple[str, int, list[str]]]:
    for names in BOTH_ORDERS:
        with loopback_listener() as listener:
            port = listener.getsockname()[1]
        size = min(ranks, torch.accelerator.device_count())
        results = spawn(partial(use_both, port, names), size, "tcp", timeout=TIMEOUT)
        wrong = [each for _, wrong in results for each in wrong]
        yield f"{names}, {size} ranks", sum(right for right, _ in results), wrong


# ------------------------------------------------------------------------------
# NCCL: what Phalanx costs on top of torch.distributed.

NCCL_BYTES = (1 << 20, 16 << 20, 256 << 20)
ROUNDS, IN_A_ROUND = 21, 5
LEAST = 0.99  # of torch's bandwidth


def time_both(port: int, kind: str, backend: Backend) -> list[tuple[int, float, float]]:
    """For each size: bytes, and the median seconds of a call of Phalanx and of torch."""
    device = torch.device("cpu")
    if kind == "nccl":
        device = torch.device("cuda", backend.rank)
        torch.cuda.set_device(device)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        kind, init_method=method, rank=backend.rank, world_size=backend.world_size
    )
    table = []
    with TorchBackend(timeout=TIMEOUT) as ours:
        for nbytes in NCCL_BYTES:
            tensor = torch.zeros(nbytes // 4, device=device)
            calls = (lambda t: phalanx.all_reduce_(t, ours), dist.all_reduce)
            seconds: tuple[list[float], list[float]] = ([], [])
            for number in range(ROUNDS + 2):
                for call, taken in zip(calls, seconds, strict=True):
                    began = time.perf_counter()
                    for _ in range(IN_A_ROUND):
                        call(tensor)
                    if kind == "nccl":
                        torch.cuda.synchronize()
                    if number >= 2:  # the first ones warm up
                        taken.append((time.perf_counter() - began) / IN_A_ROUND)
            table.append((nbytes, statistics.median(seconds[0]), statistics.median(seconds[1])))
    dist.destroy_process_group()
    return table


def nccl(ranks: int) -> Iterator[tuple[str, int, list[str]]]:
    with loopback_listener() as listener:
        port = listener.getsockname()[1]
    tables = spawn(partial(time_both, port, "nccl"), ranks, "tcp", timeout=TIMEOUT)
    for size in zip(*tables, strict=True):
        nbytes, ours, theirs = size[0][0], max(s[1] for s in size), max(s[2] for s in size)
        what = f"all_reduce of {nbytes >> 20} MiB: {nbytes / ours / 1e9:.2f} GB/s, "
        what += f"{theirs / ours:.3f} x torch.distributed"
        yield what, int(theirs / ours >= LEAST), [what] if theirs / ours < LEAST else []


# ------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[int], Iterator[tuple[str, int, list[str]]]]] = MappingProxyType(
    {
        "collectives": collectives,
        "order": order,
        "training": training,
        "script": whole_script,
        "torch": torch_groups,
        "nccl": nccl,
    }
)

GPUS_FOR_NCCL: Mapping[str, int] = MappingProxyType({"torch": 1, "nccl": 2})


def why_skipped(part: str, device: torch.device) -> str:
    """Why a part cannot be run here; nothing if it can."""
    if device.type == "cpu":
        return "torch has no accelerator here, and torch_openreg is not installed"
    if part not in GPUS_FOR_NCCL:
        return ""
    if device.type != "cuda" or not dist.is_nccl_available():
        return f"the device is {device.type}, and NCCL is for cuda"
    gpus, least = torch.cuda.device_count(), GPUS_FOR_NCCL[part]
    return "" if gpus >= least else f"it takes {least} GPUs, and there are {gpus}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Tensors on a device, beside the CPU.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=tuple(PARTS))
    options = parser.parse_args()
    device, failed = device_of(0), False
    print(f"device: {device.type}")
    for part, run in PARTS.items():
        if options.only not in (None, part):
            continue
        if why := why_skipped(part, device):
            print(f"{part}: skipped: {why}")
            continue
        for what, right, wrong in run(options.ranks):
            print(f"{part}: {what}: {right} of {right + len(wrong)}", flush=True)
            for each in wrong[:5]:
                print(f"    wrong: {each}")
            failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
