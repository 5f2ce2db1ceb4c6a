"""The rows of the table: wrappers, strategies, and the nestings that a mesh allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from job import Job
from torch import nn

import phalanx
from phalanx import ShardingStrategy

PLAN = {"*up": "column", "*down": "row"}  # the layers that tensor parallelism cuts
EVERY = 2  # steps between two syncs of ranks that train by themselves


@dataclass(frozen=True)
class Way:
    """One way to split a model over ranks.

    axes     of the mesh: how many ranks along each. "data": each has a part of the batch
    kind     of what has the data axis: "ddp", "fsdp", "local", or "" without one
    made     makes that of a module and the data axis's backend
    buffers  whose buffers count in training: "rank 0", each rank's "own", or their "mean"
    """

    name: str
    axes: dict[str, int]
    kind: str
    made: Callable[..., nn.Module] | None = None
    schedule: str = ""
    buffers: str = "own"

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def ranks(self) -> int:
        return prod(self.axes.values())

    @property
    def parts(self) -> int:
        """How many parts a batch has."""
        return self.axes.get("data", 1)

    @property
    def local(self) -> bool:
        return self.kind == "local"

    @property
    def sharded(self) -> bool:
        return self.kind == "fsdp"

    @property
    def pipeline(self) -> bool:
        return "stage" in self.axes

    @property
    def tensor(self) -> bool:
        return "tensor" in self.axes

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged in backward passes."""
        return self.kind in ("ddp", "fsdp")

    def meet(self, job: Job) -> None:
        """Make the groups of ranks."""
        backend = job.backend
        assert backend is not None
        if len(self.axes) > 1:
            job.mesh = phalanx.DeviceMesh(backend, list(self.axes.values()), list(self.axes))
            job.data = job.mesh["data"] if "data" in self.axes else None
        elif "data" in self.axes:
            job.data = backend
        job.parts = [job.data.rank if job.data is not None else 0]
        job.part = job.parts[0]

    def place(self, job: Job) -> int:
        """Which part of the batch a rank has."""
        return job.data.rank if job.data is not None else 0

    def axis(self, job: Job, name: str) -> phalanx.Backend:
        assert job.backend is not None
        return job.mesh[name] if job.mesh is not None else job.backend

    def wrap(self, job: Job, model: nn.Module) -> nn.Module:
        """The model, split over the ranks."""
        if self.tensor:
            model = phalanx.parallelize(model, self.axis(job, "tensor"), PLAN)
        if not self.pipeline:
            return self._over_data(job, model)
        layers = nn.Sequential()
        for name, layer in model.named_children():
            has_any = next(layer.parameters(), None) is not None
            layers.add_module(name, self._over_data(job, layer) if has_any else layer)
        config = phalanx.PipelineParallelConfig(2, 2, self.schedule)
        return phalanx.Pipeline(layers, self.axis(job, "stage"), config)

    def _over_data(self, job: Job, model: nn.Module) -> nn.Module:
        options = job.options()
        if self.made is None:
            assert not options
            return model
        return self.made(model, job.data, **options)

    def saves_with(self, job: Job) -> dict[str, Any]:
        """The folder and the backend of a checkpoint: ranks that have the same part of layers."""
        if not self.tensor:
            backend = job.mesh["data", "stage"] if job.mesh is not None else job.backend
            return {"folder": job.folder / "checkpoint", "backend": backend}
        tensor = self.axis(job, "tensor")
        others = [name for name in self.axes if name != "tensor"]
        backend = job.mesh[others[0]] if job.mesh is not None and others else None
        return {"folder": job.folder / f"checkpoint-{tensor.rank}", "backend": backend}


def fsdp(strategy: ShardingStrategy) -> Callable[..., nn.Module]:
    return lambda module, backend, **options: phalanx.FSDP(
        module, backend, strategy=strategy, **options
    )


def local_sgd(module: nn.Module, backend: phalanx.Backend, **options: Any) -> nn.Module:
    return phalanx.LocalSGD(module, backend, every=EVERY, **options)


def outer(parameters: Any, *, momentum: bool = True) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer; without momentum it is LocalSGD, to rounding."""
    if not momentum:
        return torch.optim.SGD(parameters, lr=1.0)
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def diloco(module: nn.Module, backend: phalanx.Backend, **options: Any) -> nn.Module:
    momentum = "compression" not in options  # without it what was left out may come later

    def made(parameters: Any) -> torch.optim.Optimizer:
        return outer(parameters, momentum=momentum)

    return phalanx.DiLoCo(module, backend, every=EVERY, outer=made, **options)


TWO, GRID = {"data": 2}, {"data": 2, "tensor": 2}
STAGES = {"data": 2, "stage": 2}
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
WAYS = [
    Way("DDP", TWO, "ddp", phalanx.DDP, buffers="rank 0"),
    Way("FULL_SHARD", TWO, "fsdp", fsdp(FULL)),
    Way("SHARD_GRAD_OP", TWO, "fsdp", fsdp(GRAD_OP)),
    Way("NO_SHARD", TWO, "fsdp", fsdp(ShardingStrategy.NO_SHARD)),
    Way("hybrid", {"data": 4}, "fsdp", fsdp(ShardingStrategy.hybrid(2))),
    Way("LocalSGD", TWO, "local", local_sgd, buffers="mean"),
    Way("DiLoCo", TWO, "local", diloco, buffers="mean"),
    Way("1F1B", {"stage": 2}, "", schedule="1f1b"),
    Way("ZB-H1", {"stage": 2}, "", schedule="zb_h1"),
    Way("tensor", {"tensor": 2}, ""),
    Way("DDP x tensor", GRID, "ddp", phalanx.DDP, buffers="rank 0"),
    Way("FULL_SHARD x tensor", GRID, "fsdp", fsdp(FULL)),
    Way("LocalSGD x tensor", GRID, "local", local_sgd, buffers="mean"),
    Way("1F1B x DDP", STAGES, "ddp", phalanx.DDP, schedule="1f1b", buffers="rank 0"),
    Way("ZB-H1 x FULL_SHARD", STAGES, "fsdp", fsdp(FULL), schedule="zb_h1"),
    Way("1F1B x tensor", {"stage": 2, "tensor": 2}, "", schedule="1f1b"),
]
BY_NAME = {way.name: way for way in WAYS}
