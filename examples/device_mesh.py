"""Four ranks as a grid: the batch is cut along one axis, the model along the other.

phalanx run -n 4 examples/device_mesh.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import phalanx as px
from phalanx.tensor import full_state_dict


def train(
    backend: px.Backend, data: int = 2, steps: int = 20
) -> tuple[list[float], dict[str, Tensor]]:
    mesh = px.DeviceMesh(backend, (data, backend.world_size // data), ("data", "tensor"))
    if backend.rank == 0:
        print(mesh)

    torch.manual_seed(0)  # the same model and data on every rank
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    inputs = torch.randn(32, 8)
    targets = inputs.square().sum(1, keepdim=True)

    px.parallelize(model, mesh["tensor"], {"0": "column", "2": "row"})
    ddp = px.DDP(model, mesh["data"])  # averages over the ranks that have the same part of it
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    rows = px.shard_tensor(torch.arange(32), data)[mesh["data"].rank]
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(ddp(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(px.all_reduce(loss.detach(), mesh["data"], px.ReduceOp.MEAN).item())
    if backend.rank == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses, full_state_dict(ddp)


if __name__ == "__main__":
    with px.init() as backend:
        train(backend, data=2 if backend.world_size % 2 == 0 else 1)
