"""Data that ends earlier on some ranks: `join` keeps all ranks together until the last one ends.

phalanx run -n 2 examples/recipes/uneven_data.py
"""

import torch
from torch import nn

import phalanx

torch.manual_seed(0)
STREAMS = [[torch.rand(5 + 2 * i, 4) for i in range(n)] for n in (3, 5)]
JOINED = [torch.cat([x[i] for x in STREAMS if i < len(x)]) for i in range(5)]


def main(backend: phalanx.Backend) -> None:
    model, plain = phalanx.DDP(nn.Linear(4, 1), backend), nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))

    def update() -> None:  # what follows a backward pass
        optimizer.step()
        optimizer.zero_grad()

    with model.join(update):  # a rank that has ended does it with the others
        for x in STREAMS[backend.rank]:
            with model.step(len(x)) as step:
                step.backward((model(x) - x.sum(1, keepdim=True)).square().sum())
            update()
    for x in JOINED:  # one process
        alone.zero_grad()
        (plain(x) - x.sum(1, keepdim=True)).square().mean().backward()
        alone.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    backend.print(f"batches of the ranks: {[*map(len, STREAMS)]}; parameters as in one process")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
