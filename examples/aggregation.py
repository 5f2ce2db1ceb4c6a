"""The smallest training loop: compute, aggregate, apply; by whichever aggregator is named.

phalanx run -n 2 examples/aggregation.py
phalanx run -n 2 examples/aggregation.py parameter_server         (--help names all)
phalanx run -n 2 examples/aggregation.py top_k
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import phalanx
from phalanx import train_epoch
from phalanx.training import CompressionConfig, DataParallelConfig, DistributedConfig

KINDS = ("local", "all_reduce", "parameter_server", "top_k")
TOP_K = CompressionConfig("top_k", {"ratio": 0.1}, error_feedback=True)


def main(kind: str = "all_reduce", *, epochs: int = 3) -> float:
    backend = phalanx.init()
    rank = DistributedConfig(backend.world_size, backend.rank)
    config = (
        DataParallelConfig(rank, "compressed", TOP_K)
        if kind == "top_k"
        else DataParallelConfig(rank, kind)
    )
    aggregator = config.build(backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parameters = list(model.parameters())

    def compute(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True))
        return loss, torch.autograd.grad(loss, parameters)

    def apply(averages: list[Tensor]) -> None:
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.grad = average
        optimizer.step()

    data = torch.rand(3200, 8)[backend.rank :: backend.world_size]
    loss = 0.0
    for epoch in range(epochs):
        batches = torch.split(data, 32)
        loss = train_epoch(batches, compute, apply, aggregator, description=f"epoch {epoch}")
        if backend.rank == 0:
            print(f"epoch {epoch}: mean loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("aggregator", nargs="?", choices=KINDS, default="all_reduce")
    main(parser.parse_args().aggregator)
