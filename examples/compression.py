"""DDP that sends less: loss and bytes of each compressor.

python examples/compression.py (two ranks in this process), phalanx run -n 4 examples/compression.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx import DDP, Backend, init, simulate
from phalanx.compression import Compressor, ErrorFeedback, Half, PowerSGD, Quantized, TopK

COMPRESSORS: dict[str, Compressor | None] = {
    "dense": None,
    "bfloat16": Half(),
    "8 bits": Quantized(bits=8),
    "1 bit, error feedback": ErrorFeedback(Quantized(bits=1)),
    "PowerSGD of rank 2, error feedback": ErrorFeedback(PowerSGD(2)),
    "top 1 %, error feedback": ErrorFeedback(TopK(0.01)),
    "top 1 %": TopK(0.01),
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Points in 32 dimensions; their class is the largest of four of their sums."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return x, x.view(-1, 4, 8).sum(-1).argmax(-1)


def train(backend: Backend, compression: Compressor | None, steps: int = 100) -> tuple[float, int]:
    """The loss on points that are not trained on, and the bytes that a rank has sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))
    ddp = DDP(model, backend, compression=compression)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    for step in range(steps):
        x, y = batch(step * backend.world_size + backend.rank)
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    x, y = map(torch.cat, zip(*(batch(10**6 + i) for i in range(8)), strict=True))
    return nn.functional.cross_entropy(model(x), y).item(), ddp.bytes_sent


def compare(backend: Backend) -> None:
    for name, compression in COMPRESSORS.items():
        loss, nbytes = train(backend, compression)
        if backend.rank == 0:
            print(f"{name:36} loss {loss:.3f}   {nbytes:9,} bytes sent")


if __name__ == "__main__":
    world = init()
    if world.world_size == 1:
        simulate(compare, 2)
    else:
        compare(world)
