"""Two laptops train one model: DDP over the network between them, both with the same token.

phalanx run --nnodes 2 --node-rank 0 --master laptop-0:29500 examples/recipes/two_laptops.py
phalanx run --nnodes 2 --node-rank 1 --master laptop-0:29500 examples/recipes/two_laptops.py
"""

import torch
from torch import nn

import phalanx


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    model = phalanx.DDP(nn.Linear(4, 1), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        x = torch.rand(32, 4)[backend.rank :: backend.world_size]
        optimizer.zero_grad()
        with model.step(len(x)) as step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum())
        optimizer.step()
    hosts = len(set(backend.topology))
    backend.print(f"ranks: {backend.world_size}, hosts: {hosts}, loss: {step.loss:.4f}")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
