"""Training with torch's own wrappers: the numbers of one process that has all samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from worlds import run

from phalanx import FSDP, TorchBackend
from phalanx.torch_backend.process_group import VERSION

WIDTH, STEPS, BATCH = 16, 3, 12
Batches = list[tuple[Tensor, Tensor]]


MODEL = nn.Sequential(
    nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
)


def layers() -> nn.Sequential:
    return copy.deepcopy(MODEL)


def batches() -> Batches:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 1, generator=generator))
        for _ in range(STEPS)
    ]


def share(tensor: Tensor, rank: int, size: int) -> Tensor:
    return tensor.chunk(size)[rank]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    size: int = 1,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> nn.Module:
    for values, wanted in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(share(values, rank, size)), share(wanted, rank, size))
        loss.backward()
        before_step(model)
        optimizer.step()
    return model


def plain(before_step: Callable[[nn.Module], object] = lambda model: None) -> dict[str, Tensor]:
    model = layers()
    return train(model, sgd(model), before_step=before_step).state_dict()


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


def clip(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


# DDP -------------------------------------------------------------------------------------------

DDP_OPTIONS = {
    "one bucket": {},
    "buckets": {"bucket_cap_mb": 0.0005},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.0005},
    "unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", DDP_OPTIONS)
def test_ddp(options: str, size: int) -> None:
    def act(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(layers(), **DDP_OPTIONS[options])
        return train(model, sgd(model), rank, size).module.state_dict()

    for state in run(act, size):
        same(state, plain())


def test_ddp_no_sync_accumulates() -> None:
    def act(rank: int) -> Tensor:
        model = DistributedDataParallel(layers())
        (first, _), (second, _), *_ = batches()
        with model.no_sync():
            model(share(first, rank, 2)).mean().backward()
        model(share(second, rank, 2)).mean().backward()
        return model.module[0].weight.grad

    model = layers()
    (first, _), (second, _), *_ = batches()
    (model(first).mean() + model(second).mean()).backward()
    for gradient in run(act):
        torch.testing.assert_close(gradient, model[0].weight.grad)


def test_ddp_join_with_uneven_inputs() -> None:
    def act(rank: int) -> tuple[int, Tensor]:
        model = DistributedDataParallel(layers(), bucket_cap_mb=0.0005)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        steps = 0
        with Join([model, optimizer]):
            for values, _ in batches()[: STEPS - rank]:
                model(values).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        return steps, model.module[0].weight.detach()

    (steps, first), (fewer, second) = run(act)
    assert (steps, fewer) == (STEPS, STEPS - 1)
    assert torch.equal(first, second)


def test_ddp_fp16_hook() -> None:
    def act(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(layers(), bucket_cap_mb=0.0005)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return train(model, sgd(model), rank, 2).module.state_dict()

    for state in run(act):
        same(state, plain(), tolerance=1e-3)


def test_ddp_post_local_sgd_hook() -> None:
    def act(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(layers())
        group = dist.new_group([0, 1])
        state = post_localSGD_hook.PostLocalSGDState(None, group, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        return train(model, sgd(model), rank, 2).module.state_dict()

    for state in run(act):
        same(state, plain())


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_power_sgd_hook_ends_with_equal_parameters(size: int) -> None:
    def act(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(layers(), bucket_cap_mb=0.0005)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(2):
            train(model, sgd(model), rank, size)
        return model.module.state_dict()

    first, *others = run(act, size)
    for other in others:
        same(other, first, tolerance=0.0)


def test_zero_redundancy_optimizer() -> None:
    def act(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(layers())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
        )
        state = train(model, optimizer, rank, 2).module.state_dict()
        optimizer.consolidate_state_dict(0)
        return state

    for state in run(act):
        same(state, plain())


# FSDP ------------------------------------------------------------------------------------------


def shard(model: nn.Sequential, **options: object) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("memory", ["torch's memory", "the group's memory"])
def test_fsdp2_with_clipping(memory: str, size: int) -> None:
    def act(rank: int) -> dict[str, Tensor]:
        model = shard(layers())
        if memory == "the group's memory":
            for module in model.modules():
                if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                    module.set_allocate_memory_from_process_group_for_comm(True)
        return whole(train(model, sgd(model), rank, size, clip))

    for state in run(act, size):
        same(state, plain(clip))


def test_hsdp() -> None:
    def act(rank: int) -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = shard(layers(), mesh=mesh)
        return whole(train(model, sgd(model), rank, 4))

    for state in run(act, 4):
        same(state, plain())


def test_fsdp1() -> None:
    def act(rank: int) -> dict[str, Tensor]:
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
        train(model, sgd(model), rank, 2)
        with FullyShardedDataParallel.summon_full_params(model):
            return copy.deepcopy(model.module.state_dict())

    for state in run(act):
        same(state, plain())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of torch 2.9's own use
def test_full_state_from_rank_0_and_checkpoints(tmp_path: Path) -> None:
    def act(rank: int) -> bool:
        model = shard(layers())
        train(model, sgd(model), rank, 2)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = whole(model)
        other = shard(layers())
        set_model_state_dict(other, state if rank == 0 else {}, options=options)
        sharded = get_model_state_dict(other)
        dcp.save(sharded, checkpoint_id=tmp_path)
        loaded = get_model_state_dict(shard(layers()))
        dcp.load(loaded, checkpoint_id=tmp_path)
        return all(torch.equal(loaded[k].to_local(), v.to_local()) for k, v in sharded.items())

    assert run(act) == [True, True]


# DTensor, tensor parallelism, pipelines --------------------------------------------------------


def test_dtensor_redistributes() -> None:
    def act(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
        other = tensor.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
        product = (tensor @ tensor.t()).full_tensor()
        assert torch.equal(other.to_local(), torch.arange(12.0).view(4, 3))
        return product

    expected = torch.arange(12.0).view(4, 3)
    for product in run(act):
        assert torch.equal(product, expected @ expected.t())


def test_tensor_parallel_plan() -> None:
    def act(rank: int) -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        model = layers()
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        train(model, sgd(model))
        state = model.state_dict()
        return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}

    for state in run(act):
        same(state, plain())


def test_phalanx_fsdp_on_a_torch_group_on_phalanx() -> None:
    def act(rank: int) -> dict[str, Tensor]:
        with TorchBackend() as backend:
            model = FSDP(layers(), backend)
            train(model, sgd(model), rank, 2)
            return model.full_state_dict()

    for state in run(act):
        same(state, plain())


@pytest.mark.skipif(VERSION == (2, 9), reason="its stages send 8 bytes, and receive 4")
def test_pipeline_1f1b() -> None:
    def act(rank: int) -> list[Tensor]:
        model = layers()
        part = model[:2] if rank == 0 else model[2:]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss)
        values, wanted = batches()[0]
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(values)
        else:
            schedule.step(target=wanted, losses=losses)
        return [parameter.grad for parameter in part.parameters()]

    model = layers()
    values, wanted = batches()[0]
    nn.functional.mse_loss(model(values), wanted).backward()
    found = [gradient for part in run(act) for gradient in part]
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
