"""A training for the tests of `phalanx watch`: rank 1 is slow while there is a file `slow`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

import phalanx

folder = Path(os.environ["WATCHED_FOLDER"])

with phalanx.init(timeout=300) as backend:
    torch.manual_seed(backend.rank)
    model = phalanx.DDP(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while not (folder / "end").exists():
        if backend.rank == 1 and (folder / "slow").exists():
            time.sleep(0.2)
        loss = model(torch.randn(64, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        backend.progress.log(step, loss=loss.item())
        if step % 20 == 0:
            print(f"step {step}", flush=True)
