"""DDP in two workers of Ray Train. When one dies, training goes on from the last checkpoint.

pip install 'phalanx[ray]'; python examples/ray_train.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from torch import nn

import phalanx
from phalanx.ops.clusters.ray import PhalanxConfig


def train() -> float:
    backend = phalanx.init()
    torch.manual_seed(0)
    model = phalanx.DDP(nn.Linear(8, 1), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    start, loss = 0, torch.zeros(())
    last = ray.train.get_checkpoint()
    if last is not None:
        with last.as_directory() as folder:
            start = phalanx.load_checkpoint(folder, **state).step
    for step in range(start + 1, 31):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(2 * step + backend.rank))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 0:
            # Each rank writes its part into Ray's folder, which all hosts see.
            folder = ray.train.get_context().get_storage().experiment_fs_path
            saved = phalanx.save_checkpoint(folder, **state, step=step, keep=None)
            ray.train.report(
                {"loss": loss.item()},
                checkpoint=Checkpoint.from_directory(saved.folder),
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
    return phalanx.all_reduce(loss.detach(), backend, phalanx.ReduceOp.MEAN).item()


if __name__ == "__main__":
    trainer = DataParallelTrainer(
        train,
        backend_config=PhalanxConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(Path("runs").resolve()), failure_config=FailureConfig(max_failures=1)
        ),
    )
    print(f"loss {trainer.fit().return_value:.4f}")
