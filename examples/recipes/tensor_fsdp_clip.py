"""Tensor parallel x FSDP on four ranks; gradients are clipped by the norm of the whole model.

phalanx run -n 4 examples/recipes/tensor_fsdp_clip.py
"""

import copy

import torch
from torch import nn

import phalanx

INPUTS = torch.rand(21, 8, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.square().sum(1, keepdim=True)
sum_of_errors = nn.MSELoss(reduction="sum")


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)  # the same layers on every rank
    plain = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    mesh = phalanx.DeviceMesh(backend, (backend.world_size // 2, 2), ("data", "tensor"))
    layers, data = copy.deepcopy(plain), mesh["data"]
    phalanx.parallelize(layers, mesh["tensor"], {"0": "column", "2": "row"})
    model = phalanx.FSDP(layers, data)
    x, y = (rows[data.rank :: data.world_size] for rows in (INPUTS, TARGETS))
    with model.step(len(x)) as step:  # ranks along "tensor" have the same rows
        step.backward(sum_of_errors(model(x), y))
    norm = phalanx.clip_grad_norm_(model, 0.5)

    (sum_of_errors(plain(INPUTS), TARGETS) / len(INPUTS)).backward()  # one process
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert abs(norm - expected) < 1e-6
    backend.print(f"loss {step.loss:.4f}, norm {norm:.4f}, as in one process")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
