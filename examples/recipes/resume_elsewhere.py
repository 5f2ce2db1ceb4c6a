"""Stop in the middle of an epoch, go on with another number of ranks: a start takes five steps.

phalanx run -n 2 examples/recipes/resume_elsewhere.py
phalanx run -n 3 examples/recipes/resume_elsewhere.py
"""

from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx

DATA = TensorDataset(torch.rand(180, 4, generator=torch.Generator().manual_seed(0)))
FOLDER = "runs/recipes/resume_elsewhere"


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    model = phalanx.DDP(nn.Linear(4, 1), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = phalanx.BatchSampler(len(DATA), backend, batch_size=15, seed=0)
    if phalanx.latest_checkpoint(FOLDER) is not None:
        saved = phalanx.load_checkpoint(FOLDER, model=model, optimizer=optimizer)
        sampler.load_state_dict(saved.extra)
    loader = DataLoader(DATA, batch_sampler=sampler)
    for (x,) in islice(sampler.track(loader), 5):
        optimizer.zero_grad()
        with model.step(len(x)) as step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum())
        optimizer.step()
    done, place = sampler.taken // 15, sampler.state_dict()
    phalanx.save_checkpoint(FOLDER, model=model, optimizer=optimizer, step=done, extra=place)
    backend.print(f"{sampler.taken} of {len(DATA)} samples, loss {step.loss:.4f}")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
