"""Ranks that train by themselves and meet now and then: loss and bytes of each way.

python examples/low_communication.py                 on two simulated ranks
phalanx run -n 4 examples/low_communication.py       on ranks of their own
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phalanx import DDP, Backend, DiLoCo, ErrorFeedback, LocalSGD, Quantized, TopK, init, simulate

OUTER = partial(torch.optim.SGD, lr=0.8, momentum=0.5, nesterov=True)
WAYS: dict[str, Callable[[nn.Module, Backend], DDP | LocalSGD | DiLoCo]] = {
    "DDP": DDP,
    "LocalSGD, every 8 steps": partial(LocalSGD, every=8),
    "LocalSGD, every step, 5 %": partial(LocalSGD, every=1, compression=TopK(0.05)),
    "DiLoCo, every 25 steps, 4 bits": partial(
        DiLoCo, every=25, outer=OUTER, compression=ErrorFeedback(Quantized(bits=4))
    ),
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Points in 32 dimensions; their class is the largest of four of their sums."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return x, x.view(-1, 4, 8).sum(-1).argmax(-1)


def train(backend: Backend, way: str, steps: int = 200) -> tuple[float, int]:
    """The loss on points that are not trained on, and the bytes that a rank has sent."""
    torch.manual_seed(0)
    model = WAYS[way](nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4)), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        x, y = batch(step * backend.world_size + backend.rank)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # ranks meet in here, after every H-th
    if not isinstance(model, DDP):
        model.sync()
    x, y = map(torch.cat, zip(*(batch(10**6 + i) for i in range(8)), strict=True))
    return cross_entropy(model(x), y).item(), model.bytes_sent


def compare(backend: Backend) -> None:
    for way in WAYS:
        loss, nbytes = train(backend, way)
        if backend.rank == 0:
            print(f"{way:32} loss {loss:.3f}   {nbytes:9,} bytes sent")


if __name__ == "__main__":
    world = init()
    simulate(compare, 2) if world.world_size == 1 else compare(world)
