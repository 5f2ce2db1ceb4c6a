"""Ranks that train by themselves and meet now and then: loss and bytes of each way.

python examples/low_communication.py
phalanx run -n 4 examples/low_communication.py       on ranks of their own
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phalanx import DDP, Backend, DiLoCo, ErrorFeedback, LocalSGD, Quantized, init

WAYS: dict[str, Callable[[nn.Module, Backend], DDP | LocalSGD | DiLoCo]] = {
    "DDP": DDP,
    "LocalSGD, every 8 steps": lambda model, backend: LocalSGD(model, backend, every=8),
    "DiLoCo, every 25 steps, 4 bits": lambda model, backend: DiLoCo(
        model,
        backend,
        every=25,
        outer=lambda params: torch.optim.SGD(params, lr=0.8, momentum=0.5, nesterov=True),
        compression=ErrorFeedback(Quantized(bits=4)),
    ),
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Points in 32 dimensions; their class is the largest of four of their sums."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 32, generator=draw)
    return x, x.view(-1, 4, 8).sum(-1).argmax(-1)


def train(backend: Backend, way: str, steps: int = 200) -> tuple[float, int]:
    """The loss on points that are not trained on, and the bytes that a rank has sent."""
    torch.manual_seed(0)
    model = WAYS[way](nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4)), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        x, y = batch(step * backend.world_size + backend.rank)
        optimizer.zero_grad()
        loss: Tensor = cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # ranks meet in here, after every H-th
    if not isinstance(model, DDP):
        model.sync()
    x, y = map(torch.cat, zip(*(batch(10**6 + i) for i in range(8)), strict=True))
    return cross_entropy(model(x), y).item(), model.bytes_sent


if __name__ == "__main__":
    with init() as backend:
        for way in WAYS:
            loss, nbytes = train(backend, way)
            if backend.rank == 0:
                print(f"{way:32} loss {loss:.3f}   {nbytes:9,} bytes sent")
