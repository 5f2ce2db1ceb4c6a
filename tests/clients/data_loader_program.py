"""An epoch with torchdata's StatefulDataLoader; killed after some steps where that is said.

data_loader_program.py FOLDER SAMPLES [KILLED_AFTER]

Prints the samples of each step that is in the checkpoint, when it is.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import phalanx

SAVE_EVERY = 3  # steps


class Share(Dataset[int]):
    """The samples of one rank: every so-manieth number."""

    def __init__(self, rank: int, ranks: int, samples: int) -> None:
        self.numbers = range(rank, samples, ranks)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: int) -> int:
        return self.numbers[at]


def main(folder: str, samples: int, killed_after: int | None) -> None:
    with phalanx.init() as backend:
        share = Share(backend.rank, backend.world_size, samples)
        loader = StatefulDataLoader(share, batch_size=2, shuffle=True, num_workers=2)
        model = phalanx.DDP(nn.Linear(1, 1), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        step = 0
        if phalanx.latest_checkpoint(folder) is not None:
            loaded = phalanx.load_checkpoint(folder, model=model, optimizer=optimizer)
            loader.load_state_dict(loaded.own)
            step = loaded.step
        seen: list[int] = []
        for batch in loader:
            model(batch.float().unsqueeze(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += batch.tolist()
            step += 1
            if step == killed_after and backend.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % SAVE_EVERY == 0:
                place = loader.state_dict()
                phalanx.save_checkpoint(
                    folder, model=model, optimizer=optimizer, step=step, own=place
                )
                print("result", *seen, flush=True)
                seen.clear()
        print("result", *seen, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
