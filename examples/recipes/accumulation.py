"""Exact loss with accumulation: micro-batches of any size have the loss and gradients of the batch.

phalanx run -n 2 examples/recipes/accumulation.py
"""

import torch
from torch import nn

import phalanx

INPUTS = torch.rand(23, 4, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.square().sum(1, keepdim=True)
sum_of_errors = nn.MSELoss(reduction="sum")


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    model, plain = phalanx.DDP(nn.Linear(4, 1), backend), nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    x, y = (rows[backend.rank :: backend.world_size] for rows in (INPUTS, TARGETS))
    parts = [(x[i : i + 5], y[i : i + 5]) for i in range(0, len(x), 5)]  # the last is smaller
    means = []
    with model.step(len(x), micro_batches=len(parts)) as step:
        for inputs, targets in parts:
            errors = sum_of_errors(model(inputs), targets)
            step.backward(errors)
            means.append(errors.item() / len(inputs))

    whole = sum_of_errors(plain(INPUTS), TARGETS) / len(INPUTS)  # one process, one batch
    whole.backward()
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, its.grad)
    assert abs(step.loss - whole.item()) < 1e-6
    wrong = phalanx.mean(means, backend)
    backend.print(f"loss {step.loss:.4f}, as in one process; a mean of means is {wrong:.4f}")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
