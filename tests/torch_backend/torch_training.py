"""Training with torch's own wrappers, as programs that each rank runs.

`PROGRAMS[name].act(rank, size)` trains with `torch.distributed` initialized, on any backend, and
gives tensors; `PROGRAMS[name].expected(size)` is what they have to be: those of one process that
has all samples, or, where there is none such (`like_gloo`), each rank's tensors with Gloo.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from worlds import run_gloo

from phalanx import FSDP, TorchBackend

WIDTH, STEPS, BATCH = 12, 3, 12
State = dict[str, Tensor]
Act = Callable[[int, int], State]
Step = Callable[[nn.Module], object]


def layers() -> nn.Sequential:
    """The model, which is the same at every call and on every rank."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 1, generator=generator))
        for _ in range(STEPS)
    ]


def share(tensor: Tensor, rank: int, size: int) -> Tensor:
    return tensor.chunk(size)[rank]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def nothing(model: nn.Module) -> None:
    pass


def clip(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    size: int = 1,
    before_step: Step = nothing,
) -> nn.Module:
    for values, wanted in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(share(values, rank, size)), share(wanted, rank, size))
        loss.backward()
        before_step(model)
        optimizer.step()
    return model


def plain(before_step: Step = nothing) -> State:
    """The state that one process comes to."""
    model = layers()
    return train(model, sgd(model), before_step=before_step).state_dict()


def gradients(model: nn.Module) -> State:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def whole(model: nn.Module) -> State:
    """The full tensors of a model whose parameters are sharded."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


class Program(NamedTuple):
    """A row of `PROGRAMS`; `sizes` are the numbers of ranks with which it runs."""

    act: Act
    expected: Callable[[int], Sequence[State]]
    tolerance: float
    sizes: Sequence[int]


PROGRAMS: dict[str, Program] = {}


def like(
    state: Callable[[], State], *, tolerance: float = 1e-6, sizes: Sequence[int] = (2, 3)
) -> Callable[[Act], Act]:
    """A program which gives on every rank what one process has."""

    def add(act: Act) -> Act:
        PROGRAMS[act.__name__] = Program(act, lambda size: [state()] * size, tolerance, sizes)
        return act

    return add


def like_gloo(act: Act) -> Act:
    """A program which gives what it gives with Gloo."""

    @cache
    def expected(size: int) -> Sequence[State]:
        return run_gloo(lambda rank: act(rank, size), size)

    PROGRAMS[act.__name__] = Program(act, expected, 1e-6, (2, 3))
    return act


def check(name: str, rank: int, size: int, expected: State) -> None:
    """Run a program as one rank of the world, and compare."""
    program = PROGRAMS[name]
    found = program.act(rank, size)
    assert found.keys() == expected.keys(), name
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key],
            value,
            rtol=program.tolerance,
            atol=program.tolerance,
            msg=lambda text, key=key: f"{name}, {key} on rank {rank} of {size}: {text}",
        )


# DDP -------------------------------------------------------------------------------------------

SMALL = 0.0005  # MiB of a bucket: a layer fills it


def ddp(rank: int, size: int, hook: Any = None, state: Any = None, **options: Any) -> State:
    model = DistributedDataParallel(layers(), **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return train(model, sgd(model), rank, size).module.state_dict()


@like(plain)
def ddp_one_bucket(rank: int, size: int) -> State:
    return ddp(rank, size)


@like(plain)
def ddp_buckets(rank: int, size: int) -> State:
    return ddp(rank, size, bucket_cap_mb=SMALL)


@like(plain)
def ddp_views(rank: int, size: int) -> State:
    return ddp(rank, size, gradient_as_bucket_view=True)


@like(plain)
def ddp_static_graph(rank: int, size: int) -> State:
    return ddp(rank, size, static_graph=True, bucket_cap_mb=SMALL)


class Unused(nn.Module):
    """Layers of which the middle one is left out of every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = layers(), 0

    def forward(self, values: Tensor) -> Tensor:
        first, tanh, second, _, last = self.layers
        self.calls += 1
        return last(tanh(second(tanh(first(values))) if self.calls % 2 else first(values)))


def with_unused_parameters() -> State:
    model = Unused()
    return train(model, torch.optim.SGD(model.parameters(), 0.1)).state_dict()


@like(with_unused_parameters)
def ddp_unused_parameters(rank: int, size: int) -> State:
    model = DistributedDataParallel(Unused(), find_unused_parameters=True, bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return train(model, optimizer, rank, size).module.state_dict()


def accumulated() -> State:
    model = layers()
    (first, _), (second, _), *_ = batches()
    (model(first).mean() + model(second).mean()).backward()
    return gradients(model)


@like(accumulated)
def ddp_no_sync(rank: int, size: int) -> State:
    model = DistributedDataParallel(layers())
    (first, _), (second, _), *_ = batches()
    with model.no_sync():
        model(share(first, rank, size)).mean().backward()
    model(share(second, rank, size)).mean().backward()
    return gradients(model.module)


@like(plain, tolerance=1e-3)
def ddp_fp16_hook(rank: int, size: int) -> State:
    return ddp(rank, size, default_hooks.fp16_compress_hook, bucket_cap_mb=SMALL)


@like_gloo
def ddp_join(rank: int, size: int) -> State:
    """Ranks that have fewer batches than others."""
    model = DistributedDataParallel(layers(), bucket_cap_mb=SMALL)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for values, _ in batches()[: STEPS - rank]:
            model(share(values, rank, size)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.module.state_dict()


@like_gloo
def ddp_post_local_sgd_hook(rank: int, size: int) -> State:
    """From step 1 on each rank goes its own way; parameters are averaged after step 2."""
    model = DistributedDataParallel(layers())
    (alone, _) = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2, warmup_steps=0))
    return train(model, optimizer, rank, size).module.state_dict()


@like(plain)
def zero_redundancy_optimizer(rank: int, size: int) -> State:
    model = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    state = train(model, optimizer, rank, size).module.state_dict()
    optimizer.consolidate_state_dict(0)
    assert rank or len(optimizer.state_dict()["state"]) == len(state)
    return state


# FSDP ------------------------------------------------------------------------------------------


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def clipped() -> State:
    return plain(clip)


@like(clipped)
def fsdp2_with_clipping(rank: int, size: int) -> State:
    model = shard(layers())
    return whole(train(model, sgd(model), rank, size, clip))


@like(clipped)
def fsdp2_in_memory_of_the_group(rank: int, size: int) -> State:
    model = shard(layers())
    for module in model.modules():
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return whole(train(model, sgd(model), rank, size, clip))


@like(plain, sizes=(4,))
def hsdp(rank: int, size: int) -> State:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(layers(), mesh=mesh)
    return whole(train(model, sgd(model), rank, size))


def fsdp1(rank: int, size: int, strategy: ShardingStrategy, **options: Any) -> State:
    model = FullyShardedDataParallel(
        layers(), device_id=torch.device("cpu"), sharding_strategy=strategy, **options
    )
    train(model, sgd(model), rank, size, lambda model: model.clip_grad_norm_(0.1))
    with FullyShardedDataParallel.summon_full_params(model):
        return copy.deepcopy(model.module.state_dict())


@like(clipped)
def fsdp1_full_shard(rank: int, size: int) -> State:
    return fsdp1(rank, size, ShardingStrategy.FULL_SHARD)


@like(clipped)
def fsdp1_shard_grad_op(rank: int, size: int) -> State:
    return fsdp1(rank, size, ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)


@like(plain)
def phalanx_fsdp_on_a_torch_group(rank: int, size: int) -> State:
    """The ring: Phalanx on torch on Phalanx."""
    with TorchBackend() as backend:
        model = FSDP(layers(), backend)
        train(model, sgd(model), rank, size)
        return model.full_state_dict()


# States and checkpoints ------------------------------------------------------------------------


@like(plain)
def full_state_from_rank_0(rank: int, size: int) -> State:
    """What rank 0 alone has is cut for all, by one broadcast after the other."""
    model = shard(layers())
    state = plain() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return whole(model)


@like(plain)
def checkpoint(rank: int, size: int) -> State:
    """`dcp.save`, and `dcp.load` into a model that is cut in another way."""
    name = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name)
    model = shard(layers())
    dcp.save(get_model_state_dict(train(model, sgd(model), rank, size)), checkpoint_id=name[0])
    other = fully_shard(layers())
    loaded = get_model_state_dict(other)
    dcp.load(loaded, checkpoint_id=name[0])
    set_model_state_dict(other, loaded)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(name[0])
    return whole(other)


# DTensor, tensor parallelism, pipelines --------------------------------------------------------


def numbers() -> Tensor:
    return torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH) / WIDTH


def product() -> State:
    return {"same": numbers(), "product": numbers() @ numbers().t()}


@like(product)
def dtensor_redistributes(rank: int, size: int) -> State:
    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(numbers(), mesh, [Shard(0)])
    other = tensor.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
    return {"same": other.to_local(), "product": (tensor @ tensor.t()).full_tensor()}


@like(plain)
def tensor_parallel_plan(rank: int, size: int) -> State:
    mesh = init_device_mesh("cpu", (size,))
    model = layers()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    state = train(model, sgd(model)).state_dict()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def of_one_batch() -> State:
    model = layers()
    values, wanted = batches()[0]
    nn.functional.mse_loss(model(values), wanted).backward()
    return gradients(model)


@like(of_one_batch)
def pipeline_1f1b(rank: int, size: int) -> State:
    cuts = {2: (0, 2, 5), 3: (0, 2, 4, 5)}[size]
    part = layers()[cuts[rank] : cuts[rank + 1]]
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss)
    values, wanted = batches()[0]
    if rank == 0:
        schedule.step(values)
    elif rank == size - 1:
        schedule.step(target=wanted, losses=[])
    else:
        schedule.step()
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, gradients(part))
    return {name: value for part in parts for name, value in part.items()}


# Functional collectives ------------------------------------------------------------------------


@like_gloo
def functional_collectives(rank: int, size: int) -> State:
    def newest(name: str, older: str) -> Any:
        return getattr(functional, name, None) or getattr(functional, older)

    gather = newest("all_gather_single", "all_gather_tensor")
    gather_several = newest("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
    scatter = newest("reduce_scatter_single", "reduce_scatter_tensor")
    scatter_several = newest("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    world = dist.group.WORLD
    tensor = torch.arange(6.0).view(6, 1) + rank
    leaf = tensor.clone().requires_grad_()
    found = {
        "all_reduce": functional.all_reduce(tensor, "sum", world),
        "avg": functional.all_reduce(tensor, "avg", world),
        "broadcast": functional.broadcast(tensor, size - 1, world),
        "all_gather": gather(tensor, 1, world),
        "reduce_scatter": scatter(tensor, "sum", 0, world),
        "all_to_all": functional.all_to_all_single(tensor, None, None, world),
        "permute": functional.permute_tensor(tensor, [*range(1, size), 0], world),
        "all_to_all autograd": functional.all_to_all_single_autograd(leaf, None, None, world),
    }
    for name, several in {
        "all_reduce coalesced": functional.all_reduce_coalesced([tensor] * 2, "max", world),
        "all_gather coalesced": gather_several([tensor, tensor[:1]], world),
        "reduce_scatter coalesced": scatter_several([tensor, tensor * 2], "sum", [0, 0], world),
    }.items():
        found |= {f"{name} {n}": each for n, each in enumerate(several)}
    found["all_to_all autograd"].pow(2).sum().backward()
    found["gradient"] = leaf.grad
    return {name: each.detach().clone() for name, each in found.items()}
