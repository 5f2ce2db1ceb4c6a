"""Training by a parameter server: the task, what one process makes of it, and ranks that do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx import Backend, ParameterServer
from phalanx.aggregation import ServerMode, ServiceRecord

Factory = Callable[[list[Tensor]], torch.optim.Optimizer]
MODES = [ServerMode.SYNCHRONOUS, ServerMode.ASYNCHRONOUS, ServerMode.staleness(2)]


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


class Outcome(NamedTuple):
    """What a rank returns: a server its record, a worker its parameters in the end."""

    record: ServiceRecord | None
    params: list[Tensor]


def model() -> nn.Module:
    """The same on every rank, also where ranks are threads that share torch's random state."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.rand(param.shape, generator=draw) - 0.5)
    return net


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(16, 4, generator=draw)
    return x, x[:, :1].sin() + 0.5 * x[:, 1:2]


def gradients(net: nn.Module, worker: int, step: int) -> list[Tensor]:
    x, y = batch(worker, step)
    return list(torch.autograd.grad(nn.functional.mse_loss(net(x), y), list(net.parameters())))


def loss_of(params: Sequence[Tensor]) -> float:
    net = model()
    with torch.no_grad():
        for mine, given in zip(net.parameters(), params, strict=True):
            mine.copy_(given)
    x, y = batch(99, 99)
    return nn.functional.mse_loss(net(x), y).item()


def train(
    backend: Backend,
    mode: ServerMode,
    *,
    servers: Sequence[int] = (0,),
    steps: int = 8,
    optimizer: Factory = sgd,
    on_step: Callable[[ServiceRecord], None] | None = None,
    quorum: int | None = None,
) -> Outcome:
    """Be whatever this rank is: servers serve, and the others take so many steps."""
    net = model()
    params = list(net.parameters())
    if backend.rank in servers:
        record = ParameterServer.serve(
            params, backend, optimizer, servers=servers, mode=mode, on_step=on_step, quorum=quorum
        )
        return Outcome(record, record.params)
    with ParameterServer.connect(params, backend, servers=servers) as client:
        client.pull_()
        for step in range(steps):
            client.step(gradients(net, backend.rank, step))
    return Outcome(None, params)


def alone(
    workers: Sequence[int],
    steps: int,
    optimizer: Factory = sgd,
) -> list[Tensor]:
    """What one process makes of the mean of all workers' gradients."""
    net = model()
    params = list(net.parameters())
    made = optimizer(list(params))
    for step in range(steps):
        each = [gradients(net, worker, step) for worker in workers]
        for param, *grads in zip(params, *each, strict=True):
            total = grads[0].clone()
            for grad in grads[1:]:
                total += grad
            param.grad = total / len(grads)
        made.step()
    return [param.detach() for param in params]
