"""Train a classifier on several ranks: each has the whole model, and its own part of the data.

phalanx run -n 2 examples/ddp.py        on two ranks
python examples/ddp.py                  on one: the same script, a world of one
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import phalanx


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the plane; their class is the ring around (0, 0) in which they lie."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return x, x.norm(dim=1).mul(1.5).long().clamp(max=2)


def train(backend: phalanx.Backend, steps: int = 200) -> float:
    """Train, and return the share of held-out points that are put into the right class."""
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
    ddp = phalanx.DDP(model, backend)  # now every rank has rank 0's parameters
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.02)
    for step in range(steps):
        x, y = points(64, seed=step * backend.world_size + backend.rank)  # this rank's part
        loss = cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # when it returns, .grad is the mean
        optimizer.step()
        if backend.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss.item():.3f}")
    x, y = points(2000, seed=10**6)
    right: Tensor = model(x).argmax(dim=1) == y
    return right.float().mean().item()


if __name__ == "__main__":
    with phalanx.init() as backend:
        print(f"rank {backend.rank} of {backend.world_size}: {train(backend):.1%} right")
