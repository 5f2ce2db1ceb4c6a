"""Hugging Face's Trainer, whose rank 1 is killed in a backward pass.

killed_program.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from transformers_program import new_trainer


def main(folder: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("phalanx", init_method=meeting, rank=rank, world_size=ranks)
    trainer = new_trainer(folder, steps=100)

    def hook(gradient: torch.Tensor) -> None:
        if rank == 1 and trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.model.lm_head.weight.register_hook(hook)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
