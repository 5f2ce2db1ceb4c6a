"""Evaluation: each sample counts once, though the ranks have different numbers of them.

phalanx run -n 2 examples/recipes/evaluation.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx

INPUTS = torch.randn(301, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) < 0).long())


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    model = phalanx.DDP(nn.Linear(8, 2), backend)
    sampler = phalanx.BatchSampler.evaluation(len(DATA), backend, batch_size=64)
    right = []
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(DATA, batch_sampler=sampler):
            right.append(model(x).argmax(1) == y)
    accuracy = phalanx.mean(torch.cat(right), backend)

    inputs, kinds = DATA.tensors
    with torch.no_grad():
        expected = (model.module(inputs).argmax(1) == kinds).double().mean().item()
    assert abs(accuracy - expected) < 1e-12
    counts = phalanx.all_gather_object(sum(map(len, right)), backend)
    backend.print(f"accuracy {accuracy:.4f} of {len(DATA)} samples; the ranks had {counts}")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
