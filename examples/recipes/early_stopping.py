"""Early stopping: all ranks decide by the same number, so they stop after the same epoch.

phalanx run -n 2 examples/recipes/early_stopping.py
"""

import torch
from torch import nn

import phalanx

RANDOM = torch.randn(2, 40, 9, generator=torch.Generator().manual_seed(0))
INPUTS, NOISE = RANDOM[..., :8], RANDOM[..., 8:]  # for training, and held out
TARGETS = INPUTS.sum(2, keepdim=True) + 3 * NOISE


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    model = phalanx.DDP(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = slice(backend.rank, None, backend.world_size)
    (x, held_out), (y, expected) = INPUTS[:, mine], TARGETS[:, mine]
    best, since, own, epoch = float("inf"), 0, [], 0
    while since < 3:
        epoch += 1
        optimizer.zero_grad()
        with model.step(len(x)) as step:
            step.backward((model(x) - y).square().sum())
        optimizer.step()
        losses = (model(held_out) - expected).detach().square()
        own.append(losses.mean().item())  # another number on each rank
        mean = phalanx.mean(losses, backend)  # the same number on every rank, to the last bit
        best, since = (mean, 0) if mean < best else (best, since + 1)
    ends, bests = (phalanx.all_gather_object(n, backend) for n in (epoch, 1 + own.index(min(own))))
    assert len(set(ends)) == 1
    backend.print(f"all stop after epoch {epoch}; the best epoch of each rank's own part: {bests}")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
