"""A machine is taken away: all ranks save the same step, and the next start goes on from it.

phalanx run -n 2 examples/recipes/preemption.py      twice; rank 1 plays Slurm
"""

import signal
import sys

import torch
from torch import nn

import phalanx

FOLDER = "runs/recipes/preemption"


def main(backend: phalanx.Backend) -> int:
    model = phalanx.DDP(nn.Linear(4, 1), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    first = 0
    if phalanx.latest_checkpoint(FOLDER) is not None:
        first = phalanx.load_checkpoint(FOLDER, model=model, optimizer=optimizer).step
    with phalanx.Notice(backend, signals=[signal.SIGTERM, signal.SIGUSR1], every=0) as notice:
        for step in range(first, 40):
            x = torch.rand(8, 4)[backend.rank :: backend.world_size]
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            if step == 10 and backend.rank == 1:
                signal.raise_signal(signal.SIGUSR1)  # as --signal=USR1@60 of Slurm sends it
            if notice.given():
                phalanx.save_checkpoint(FOLDER, model=model, optimizer=optimizer, step=step + 1)
                break
    backend.print(f"steps {first} to {step}, exit code {notice.exit_code}")
    return notice.exit_code


if __name__ == "__main__":
    with phalanx.init() as backend:
        sys.exit(main(backend))
