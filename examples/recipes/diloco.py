"""DiLoCo: ranks train by themselves and meet after every 25 steps, for hosts with a slow network.

phalanx run -n 2 examples/recipes/diloco.py
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phalanx import DDP, Backend, DiLoCo, ErrorFeedback, Quantized, init

OUTER = partial(torch.optim.SGD, lr=0.8, momentum=0.5, nesterov=True)
LESS = ErrorFeedback(Quantized(bits=4))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return x, x.view(-1, 4, 8).sum(-1).argmax(-1)


def main(backend: Backend) -> None:
    for wrap in (DDP, partial(DiLoCo, every=25, outer=OUTER, compression=LESS)):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(100):
            x, y = batch(step * backend.world_size + backend.rank)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()  # of DiLoCo: after every 25th one the ranks meet
        x, y = batch(10**6)  # held out
        loss, sent = cross_entropy(model.module(x), y), model.bytes_sent
        backend.print(f"{type(model).__name__}: loss {loss:.2f}, a rank has sent {sent} bytes")


if __name__ == "__main__":
    with init() as backend:
        main(backend)
