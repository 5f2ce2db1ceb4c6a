"""A parameter server: rank 0 has the optimizer, workers push gradients and pull parameters.

phalanx run -n 3 examples/recipes/one_server.py
"""

from functools import partial

import torch
from torch import Tensor, nn

from phalanx import Backend, ParameterServer, init
from phalanx.aggregation import ServerMode

INPUTS = torch.rand(24, 4, generator=torch.Generator().manual_seed(0))
MODE = ServerMode.SYNCHRONOUS  # or ASYNCHRONOUS, or staleness(2)


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return torch.autograd.grad(loss, list(model.parameters()))


def main(backend: Backend) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    params, workers = list(model.parameters()), backend.world_size - 1
    if backend.rank == 0:
        expected = [p - 0.1 * g for p, g in zip(params, gradients(model, INPUTS), strict=True)]
        optimizer = partial(torch.optim.SGD, lr=0.1)
        record = ParameterServer.serve(params, backend, optimizer, mode=MODE)
        torch.testing.assert_close(params, expected)  # one step of one process
        backend.print(f"{record.steps} step, pushes of each worker: {record.pushes}")
    else:
        with ParameterServer.connect(params, backend) as client:
            client.step(gradients(model, INPUTS[backend.rank - 1 :: workers]))


if __name__ == "__main__":
    with init() as backend:
        main(backend)
