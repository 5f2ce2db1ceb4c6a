"""Pods may die at any step: each start goes on from the last checkpoint on the volume.

phalanx run -n 2 --max-restarts 1 examples/recipes/kubernetes.py      a rank dies, and comes again
"""

import sys

import torch
from torch import nn

import phalanx


def main(backend: phalanx.Backend, folder: str = "runs/recipes/kubernetes") -> None:
    torch.manual_seed(0)
    model = phalanx.DDP(nn.Linear(4, 1), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    first = 0
    if phalanx.latest_checkpoint(folder) is not None:
        first = phalanx.load_checkpoint(folder, model=model, optimizer=optimizer).step
    for step in range(first, 20):
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if (step + 1) % 5 == 0:
            phalanx.save_checkpoint(folder, model=model, optimizer=optimizer, step=step + 1)
        if first == 0 and step == 12 and backend.rank == backend.world_size - 1:
            sys.exit("this stands for a pod that dies")
    backend.print(f"steps {first} to {step}")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend, *sys.argv[1:])
