"""A parameter server: rank 0 has the parameters, and applies gradients when they come.

python examples/parameter_server.py                     on four simulated ranks
phalanx run -n 4 examples/parameter_server.py staleness (or synchronous, or asynchronous)
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

from phalanx import Backend, ParameterServer, init, simulate
from phalanx.aggregation import ServerMode

MODES = {
    "asynchronous": ServerMode.ASYNCHRONOUS,
    "synchronous": ServerMode.SYNCHRONOUS,
    "staleness": ServerMode.staleness(2),
}


def gradients(model: nn.Module, seed: int) -> tuple[float, tuple[Tensor, ...]]:
    x = torch.rand(64, 8, generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True))
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def train(backend: Backend, mode: ServerMode, *, steps: int = 100) -> float:
    """On the server the loss in the end; on a worker that of its last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    params = list(model.parameters())
    if backend.rank == 0:
        record = ParameterServer.serve(
            params, backend, lambda mine: torch.optim.SGD(mine, lr=0.02), mode=mode, quorum=1
        )
        loss, _ = gradients(model, 0)
        print(f"{record.steps} steps, pushes of each worker: {record.pushes}, loss {loss:.3f}")
        return loss
    loss, rank, last = 0.0, backend.rank, backend.world_size - 1
    if rank == last > 1:
        backend.recv(bytearray(), 1)  # it comes late, and takes part from then on
    with ParameterServer.connect(params, backend) as client:
        client.pull_()
        for step in range(steps):
            if rank == 1 < last and step == steps // 2:
                backend.send(b"", last)
            loss, given = gradients(model, 1000 * rank + step)
            client.step(given)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", nargs="?", choices=MODES, default="asynchronous")
    run, world = partial(train, mode=MODES[parser.parse_args().mode]), init()
    simulate(run, 4) if world.world_size == 1 else run(world)
