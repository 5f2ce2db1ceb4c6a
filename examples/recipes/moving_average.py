"""A moving average of the parameters (EMA) with FSDP: each rank averages its own shards.

phalanx run -n 2 examples/recipes/moving_average.py
"""

import copy
from contextlib import nullcontext

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx import FSDP, Backend, init

INPUTS = torch.rand(24, 4, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, x: torch.Tensor) -> AveragedModel:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        with average.module.writing() if isinstance(average.module, FSDP) else nullcontext():
            average.update_parameters(model)
    return average


def main(backend: Backend) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    average = train(FSDP(copy.deepcopy(plain), backend), INPUTS[backend.rank :: backend.world_size])
    torch.testing.assert_close(average(INPUTS), train(plain, INPUTS)(INPUTS))
    backend.print(f"{average.n_averaged} steps: the average has the outputs of one process")


if __name__ == "__main__":
    with init() as backend:
        main(backend)
