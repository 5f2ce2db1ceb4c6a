"""A program for Accelerate as its users write them; nothing here knows of Phalanx.

    accelerate_program.py FOLDER [BACKEND]

With BACKEND the process group is there before the Accelerator, which takes it as it is; else the
Accelerator makes its own, over Gloo. Rank 0 prints what it came to.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 37  # which no number of ranks divides: the last batch is filled up


def main(folder: str, backend: str | None = None) -> None:
    if backend:
        dist.init_process_group(backend)
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.print("result backend", dist.get_backend(), accelerator.num_processes)

    model = nn.Sequential(
        nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3)
    )
    samples = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(3, (SAMPLES,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    batches = DataLoader(samples, batch_size=4, shuffle=True)
    held_out = DataLoader(samples, batch_size=4)
    model, optimizer, scheduler, batches, held_out = accelerator.prepare(
        model, optimizer, scheduler, batches, held_out
    )
    for epoch in range(2):
        train(accelerator, model, optimizer, scheduler, batches)
        evaluate(accelerator, model, held_out)
        if epoch == 0:
            accelerator.save_state(folder)
    accelerator.load_state(folder)
    evaluate(accelerator, model, held_out)
    talk(accelerator)
    accelerator.save_model(model, folder)
    accelerator.end_training()


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    batches: DataLoader,
) -> None:
    for step, (inputs, targets) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                accelerator.print("result norm", norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print("result loss", step, mean.item())


def evaluate(accelerator: Accelerator, model: nn.Module, held_out: DataLoader) -> None:
    model.eval()
    losses, hits = [], []
    with torch.no_grad():
        for inputs, targets in held_out:
            found = model(inputs)
            loss = nn.functional.cross_entropy(found, targets, reduction="none")
            all_loss, all_hits = accelerator.gather_for_metrics((loss, found.argmax(1) == targets))
            losses.append(all_loss)
            hits.append(all_hits)
    model.train()
    loss, hit = torch.cat(losses), torch.cat(hits)
    accelerator.print("result evaluated", loss.mean().item(), hit.sum().item(), "of", len(hit))


def talk(accelerator: Accelerator) -> None:
    rank = accelerator.process_index
    padded = accelerator.pad_across_processes(torch.ones(1 + rank), dim=0)
    with accelerator.split_between_processes([1, 2, 3, 4, 5]) as mine:
        shares = gather_object([list(mine)])
    words = [f"from rank {rank}"]
    broadcast_object_list(words)
    accelerator.print("result others", accelerator.gather(padded).tolist(), shares, words)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
