"""What the ranks of a job of Slurm run in the tests: training that can be told to end.

python slurm_program.py FOLDER  trains until a SIGTERM to any rank, saves in FOLDER, ends with 75;
started again, three steps more, then it ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import phalanx


def main(folder: Path) -> None:
    backend = phalanx.init(timeout=120)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    ddp = phalanx.DDP(model, backend)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    start, end = 0, 10**9
    if phalanx.latest_checkpoint(folder) is not None:
        start = phalanx.load_checkpoint(folder, model=ddp, optimizer=optimizer).step
        end = start + 3
    with phalanx.Notice(backend) as notice:
        for step in range(start, end):
            optimizer.zero_grad()
            # Each rank's gradient is -(rank + 1): the weight counts the steps, times their mean.
            (-ddp(torch.full((1, 1), backend.rank + 1.0))).sum().backward()
            optimizer.step()
            if step == start:
                print(
                    f"rank {backend.rank} of {backend.world_size} trains from {start}", flush=True
                )
            if notice.given():
                phalanx.save_checkpoint(folder, model=ddp, optimizer=optimizer, step=step + 1)
                print(f"saved at step {step + 1}", flush=True)
                sys.exit(notice.exit_code)
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    weight = model.weight.item() / ((backend.world_size + 1) / 2)
    print(f"start {restarts} ends at step {end} with {weight:g}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
