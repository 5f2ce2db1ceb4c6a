"""The bubble of every pipeline schedule, measured side by side: `make pipeline-bubble`.

The ranks train equal blocks (a linear layer and a GELU) in each schedule in turn, one step each,
round after round. Rank 0 shows of each schedule, as medians over the rounds:

- **bubble**: the share of the ranks' time in which they were in no layer (`pipeline_bubble`),
  since they waited for messages or handled them; and what it is in theory, if stages take equally
  long and messages no time.
- **step**: how long the slowest rank took, and that beside 1F1B's step in the same round.
- **activations**: the most that a rank held, in stages of p that all layers would be.

`make` sees to it that glibc's malloc keeps what is freed (`MALLOC_MMAP_THRESHOLD_` and
`MALLOC_TRIM_THRESHOLD_`): with short passes page faults otherwise take a tenth of the time, and not
equally much on each rank. phalanx run -n 2 benchmarks/pipeline_bubble.py --rows 1024 does without.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.pipeline.schedules import SCHEDULES

BLOCKS = 12  # as many on each of 1, 2, 3 or 6 ranks, also in two chunks
INPUTS = 4
WARM = 2  # rounds that do not count


class Schedule:
    """A pipeline in one schedule; its bubbles and seconds, one of each round."""

    def __init__(self, name: str, backend: px.Backend, micro_batches: int, width: int) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)]
        blocks[0].insert(0, nn.Linear(INPUTS, width))  # or the first block's input had no gradient
        config = px.PipelineParallelConfig(backend.world_size, micro_batches, name)
        self.pipeline = px.Pipeline(blocks, backend, config)
        self.optimizer = torch.optim.SGD(self.pipeline.parameters(), lr=1e-3)
        self.bubbles: list[float] = []
        self.seconds: list[float] = []

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Train one batch, and note how it went."""
        backend = self.pipeline.backend
        self.optimizer.zero_grad()
        backend.barrier()
        began = perf_counter()
        self.pipeline.train_step(inputs, targets, nn.functional.mse_loss)
        took = torch.tensor(perf_counter() - began, dtype=torch.float64)
        self.optimizer.step()
        self.bubbles.append(self.pipeline.pipeline_bubble().measured)
        self.seconds.append(px.all_reduce(took, backend, px.ReduceOp.MAX).item())


def main(backend: px.Backend, micro_batches: int, width: int, rows: int, rounds: int) -> None:
    """Measure all schedules, and show a line of each."""
    schedules = {name: Schedule(name, backend, micro_batches, width) for name in SCHEDULES}
    batch = torch.randn(rows, INPUTS), torch.randn(rows, width)
    for _ in range(WARM + rounds):
        for schedule in schedules.values():
            schedule.step(*batch)
    lines = [
        ("schedule", "bubble", "theory", "step", "beside 1f1b", "activations"),
        ("---", *["---:"] * 5),
    ]
    for name, schedule in schedules.items():
        seconds = schedule.seconds[WARM:]
        ratios = map(float.__truediv__, seconds, schedules["1f1b"].seconds[WARM:])
        config = schedule.pipeline.config
        peak = torch.tensor(schedule.pipeline.peak_activations / config.chunks)
        line = (
            f"{median(schedule.bubbles[WARM:]):.1%}",
            f"{config.bubble:.1%}",
            f"{median(seconds) * 1e3:.0f} ms",
            f"{median(ratios):.2f}",
            f"{px.all_reduce(peak, backend, px.ReduceOp.MAX).item():g}",
        )
        lines.append((name, *line))
    if backend.rank == 0:
        print(f"{backend.world_size} stages, {micro_batches} micro-batches, {rounds} rounds")
        for name, *cells in lines:
            print(f"| {name:16} | {' | '.join(f'{cell:>11}' for cell in cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    with px.init() as backend:
        main(backend, **vars(parser.parse_args()))
