"""A classifier of noisy pictures whose ranks may die while it trains: the others go on.

python examples/elastic.py                                                    on one rank
phalanx run -n 4 --min 2 --max-restarts 3 examples/elastic.py --crash 40      one dies in step 40
"""

import argparse
import logging
import os
import signal
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import phalanx


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures of 8 x 8 pixels, each one of ten patterns with noise; and of which pattern."""
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (count,), generator=generator)
    return patterns[classes] + 2 * torch.randn(count, 64, generator=generator), classes


def train(job: phalanx.Elastic, steps: int = 500, crash: int = -1, pause: float = 0.0) -> float:
    """Train; return the share of new pictures that are put into the right class."""
    pictures, classes = draw(2000, seed=0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = phalanx.DDP(net, job.backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    batches = job.sampler(len(pictures), batch_size=64)
    job.keep(model=model, optimizer=optimizer)
    for step in job.steps(steps):
        with step:  # counts on all ranks, or on none
            mine = batches.take()  # this rank's part of the joined batch
            loss = cross_entropy(model(pictures[mine]), classes[mine])
            optimizer.zero_grad()
            (loss * step.weight).backward()  # type: ignore[no-untyped-call]
            if step.number == crash and step.generation == 1 and job.backend.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
        if step.done and step.number % 50 == 0:  # if it is not done, it comes again
            ranks = job.backend.world_size
            job.backend.print(f"step {step.number}: loss {loss:.3f}, {ranks} ranks")
        time.sleep(pause)
    pictures, classes = draw(2000, seed=1)
    return float((net(pictures).argmax(dim=1) == classes).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--crash", type=int, default=-1, help="rank 1 is killed in this step, once")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds after each step")
    logging.basicConfig(format="%(message)s", level=logging.INFO)  # a line for each generation
    job = phalanx.Elastic()
    print(f"{train(job, **vars(parser.parse_args())):.1%} right")
