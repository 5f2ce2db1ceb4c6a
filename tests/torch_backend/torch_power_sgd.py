"""PowerSGD's hook, which runs collectives in callbacks: does it end, and with which losses?

`python tests/torch_backend/torch_power_sgd.py [--times N]`: 6 buckets, 6 steps, on 2 and 3 ranks.
These are processes, since the hook draws from torch's generator, of which threads share one.
Gradients and parameters have to be equal on all ranks, and in all runs. An approximation of full
rank is exact: its numbers have to be those of one process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import jobs
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

BUCKETS, STEPS, WIDTH, BATCH = 6, 6, 32, 24
SMALL = 0.0001  # MiB of a bucket: each layer has one of its own


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BUCKETS))
    )


def train(model: nn.Module, rank: int = 0, size: int = 1) -> list[float]:
    """The sum of squares of the gradients in each step, and the parameters in the end."""
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        samples = torch.rand(BATCH, WIDTH, generator=generator)
        model(samples.chunk(size)[rank]).pow(2).mean().backward()
        sums.append(sum(each.grad.pow(2).sum().item() for each in model.parameters()))
        optimizer.step()
    parameters = torch.cat([each.detach().view(-1) for each in model.parameters()])
    return [*sums, *parameters.tolist()]


def runs(rank: int, size: int, times: int, approximation_rank: int) -> list[list[float]]:
    found = []
    for _ in range(times):
        model = DistributedDataParallel(layers(), bucket_cap_mb=SMALL)
        state = powerSGD_hook.PowerSGDState(
            None, approximation_rank, start_powerSGD_iter=2, min_compression_rate=0
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found.append(train(model, rank, size))
    return found


def problem(size: int, times: int, approximation_rank: int) -> str:
    """What went wrong in so many runs, if anything did."""
    outcomes = jobs.run(runs, size, size, times, approximation_rank)
    if any(outcome.how != "returned" for outcome in outcomes.values()):
        return str(outcomes)
    first, *others = (run for outcome in outcomes.values() for run in outcome.value)
    if any(other != first for other in others):
        return "other numbers on another rank, or in another run"
    exact = torch.tensor(train(layers()))
    if approximation_rank == WIDTH and not torch.allclose(torch.tensor(first), exact, 1e-3, 1e-5):
        return "not the numbers of one process"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    times = parser.parse_args().times
    good = True
    for size in (2, 3):
        for approximation_rank in (1, WIDTH):
            wrong = problem(size, times, approximation_rank)
            right = times if not wrong else 0
            print(
                f"{size} ranks, rank-{approximation_rank} approximation, {BUCKETS} buckets, "
                f"{STEPS} steps: {right} of {times} {wrong}",
                flush=True,
            )
            good = good and not wrong
    sys.exit(not good)


if __name__ == "__main__":
    main()
