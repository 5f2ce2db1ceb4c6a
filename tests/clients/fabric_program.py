"""A program for Lightning Fabric as its users write them; nothing here knows of Phalanx.

    fabric_program.py FOLDER [BACKEND]

It trains with DDP, and with a model whose layers are shards. The strategies take BACKEND by name;
without one Fabric takes Gloo. Rank 0 prints what it came to.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """What a user gives ModelParallelStrategy."""
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


def main(folder: str, backend: str | None = None) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    sharded = ModelParallelStrategy(
        parallelize_fn=shard,
        data_parallel_size=ranks,
        tensor_parallel_size=1,
        process_group_backend=backend,
    )
    for strategy in (DDPStrategy(process_group_backend=backend), sharded):
        name = type(strategy).__name__
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        fabric.launch()
        fabric.print("result backend", dist.get_backend(), fabric.world_size)
        train(fabric, name, f"{folder}/{name}")


def train(fabric: Fabric, strategy: str, folder: str) -> None:
    seed_everything(0, verbose=False)
    samples = TensorDataset(torch.randn(37, 8), torch.randint(3, (37,)))
    batches = fabric.setup_dataloaders(DataLoader(samples, batch_size=4, shuffle=True))
    model = fabric.setup_module(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))

    def epoch(name: str) -> None:
        for step, (inputs, targets) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                fabric.backward(loss)
            mean = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
            fabric.print("result", strategy, name, step, mean)
            if step % 2 == 1:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
                fabric.print("result", strategy, "norm", whole.item())
                optimizer.step()
                optimizer.zero_grad()

    epoch("first")
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    epoch("second")
    fabric.load(folder, {"model": model, "optimizer": optimizer})
    epoch("first again")
    words = fabric.broadcast(f"from rank {fabric.global_rank}", src=1)
    ranks = fabric.all_gather(torch.tensor(fabric.global_rank)).tolist()
    fabric.print("result", strategy, "others", words, ranks)
    fabric.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
