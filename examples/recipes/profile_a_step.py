"""Profile a step: torch's profiler for what a rank computes, a trace for when ranks wait.

PHALANX_TRACE=runs/recipes/trace phalanx run -n 2 examples/recipes/profile_a_step.py
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import phalanx


def main(backend: phalanx.Backend) -> None:
    model = phalanx.DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.rand(32, 64)).square().mean().backward()
        optimizer.step()

    step()  # the first one allocates
    backend.counters()  # from here on the rank counts
    one_rank = profile(activities=[ProfilerActivity.CPU]) if backend.rank == 0 else nullcontext()
    with one_rank as profiler:
        step()
    sent = backend.counters().operations["all_reduce"].count
    if profiler is not None:  # profiler.key_averages().table() is the usual picture
        found = {event.key: event.count for event in profiler.key_averages()}
        backend.print(f"{found['aten::addmm'] + found['aten::mm']} products, {sent} all_reduce")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
