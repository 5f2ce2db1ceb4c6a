"""A program for Lightning's Trainer as its users write them; nothing here knows of Phalanx.

    lightning_program.py FOLDER [BACKEND]

It trains with DDP, with a model whose layers are shards, and with one whose layers are cut. The
strategies take BACKEND by name; without one Lightning takes Gloo. Rank 0 prints what was logged.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.hits = MulticlassAccuracy(3, average="micro")
        self.model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.model, tensor, plan)
        if data.size() > 1:
            fully_shard(self.model, mesh=data)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        found = self.model(batch[0])
        loss = nn.functional.cross_entropy(found, batch[1])
        self.hits(found, batch[1])
        self.log("hits", self.hits)
        self.log("held_out", loss, sync_dist=True)
        self.log("most", loss, sync_dist=True, reduce_fx="max")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Show(Callback):
    """Prints what was logged."""

    def show(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            numbers = {name: value.item() for name, value in trainer.callback_metrics.items()}
            print("result", trainer.global_step, dict(sorted(numbers.items())), flush=True)

    on_train_batch_end = on_validation_end = show


def strategies(ranks: int, backend: str | None) -> dict[str, Strategy]:
    return {
        "ddp": DDPStrategy(process_group_backend=backend),
        "shards": ModelParallelStrategy(ranks, 1, process_group_backend=backend),
        "cut": ModelParallelStrategy(1, ranks, process_group_backend=backend),
    }


def fit(name: str, folder: str, ranks: int, backend: str | None, epochs: int, last: str) -> str:
    """Train until there have been so many epochs; return the best checkpoint's path."""
    seed_everything(0, verbose=False)
    samples = TensorDataset(torch.randn(37, 8), torch.randint(3, (37,)))
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategies(ranks, backend)[name],
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5 if name == "ddp" else None,  # the others refuse it
        callbacks=[Show(), ModelCheckpoint(folder, filename="{epoch}", monitor="held_out")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader(samples, batch_size=4, shuffle=True)
    trainer.fit(Classifier(), batches, DataLoader(samples, batch_size=4), ckpt_path=last or None)
    best = trainer.checkpoint_callback.best_model_path
    trainer.print("result", name, dist.get_backend(), trainer.world_size, Path(best).name)
    return best


def main(folder: str, backend: str | None = None) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    for name in ("ddp", "shards", "cut"):
        best = fit(name, f"{folder}/{name}", ranks, backend, 1, "")
        fit(name, f"{folder}/{name} again", ranks, backend, 2, best)


if __name__ == "__main__":
    main(*sys.argv[1:])
