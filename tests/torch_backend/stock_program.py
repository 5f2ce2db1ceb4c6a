"""A program for torch.distributed as its users write them; nothing here knows of Phalanx.

    stock_program.py BACKEND WAY ROUNDS

WAY says how ranks meet: `env`, `tcp`, `file` or `store`. It makes and destroys the process group
ROUNDS times, trains in the last of them, and prints the loss that all ranks have.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def init(backend: str, way: str) -> None:
    """Join the job, by what its launcher says: mpirun has variables of its own."""
    environ = os.environ
    rank = int(environ.get("RANK", environ.get("OMPI_COMM_WORLD_RANK", "")))
    size = int(environ.get("WORLD_SIZE", environ.get("OMPI_COMM_WORLD_SIZE", "")))
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if way == "env":
        environ.setdefault("RANK", str(rank))
        environ.setdefault("WORLD_SIZE", str(size))
        dist.init_process_group(backend)
    elif way == "store":
        store = dist.TCPStore(host, int(port), size, rank == 0, timedelta(seconds=60))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    else:
        method = f"tcp://{host}:{port}" if way == "tcp" else f"file://{environ['MEETING_FILE']}"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=size)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model: nn.Module) -> float:
    """Some steps on this rank's share of the samples; the mean loss of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    values, wanted = torch.rand(12, 8, generator=generator), torch.rand(12, 1, generator=generator)
    for _ in range(5):
        optimizer.zero_grad()
        found = model(values.chunk(size)[rank])
        loss = nn.functional.mse_loss(found, wanted.chunk(size)[rank])
        loss.backward()
        optimizer.step()
    mean = loss.detach() / size
    dist.all_reduce(mean)
    return mean.item()


def main() -> None:
    backend, way, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    for _ in range(rounds - 1):
        init(backend, way)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    init(backend, way)
    loss = train(DistributedDataParallel(model()))
    if dist.get_rank() == 0:
        print(dist.get_backend(), f"{loss:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
