"""Pipeline x data on four ranks: two replicas of two stages, with parts of different sizes.

phalanx run -n 4 examples/recipes/pipeline_data.py
"""

import copy

import torch
from torch import nn

import phalanx

INPUTS = torch.rand(21, 8, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.square()
sum_of_errors = nn.MSELoss(reduction="sum")


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)  # the same layers on every rank
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    mesh = phalanx.DeviceMesh(backend, (backend.world_size // 2, 2), ("data", "stage"))
    data, stage = mesh["data"], mesh["stage"]
    layers = [*copy.deepcopy(plain)]
    start, end, _ = phalanx.split_into_stages(len(layers), 2)[stage.rank]
    layers[start:end] = [phalanx.DDP(layer, data) for layer in layers[start:end]]
    config = phalanx.PipelineParallelConfig(2, num_micro_batches=3)
    pipeline = phalanx.Pipeline(layers, stage, config, replicas=data)
    x, y = (rows[data.rank :: data.world_size] for rows in (INPUTS, TARGETS))
    loss = pipeline.train_step(x, y, sum_of_errors, weight=len(x))
    norm = phalanx.clip_grad_norm_(pipeline, 0.1)

    (sum_of_errors(plain(INPUTS), TARGETS) / len(INPUTS)).backward()  # one process
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert abs(norm - expected) < 1e-6
    backend.print(f"loss {loss:.4f}, norm {norm:.4f}, as in one process")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
