"""One rank of the gate, which gate_processes.py starts: gate_rank.py SOCKET BACKEND.

The version of the package that is measured comes first on PYTHONPATH. The rank connects to the
gate's SOCKET, makes its backend, says which package it has, and answers requests, all lines of
JSON:

    rank -> gate   {"file": "/tmp/gate-1/base/src/phalanx/__init__.py"}
    gate -> rank   {"task": "all_reduce", "nbytes": 8, "calls": 48, "seconds": 0.1}
    rank -> gate   {"seconds": 1.2e-05}         of a call: the median of the stretches
                   {"error": "ValueError: ..."}, and the rank ends

A stretch is so many calls one after the other. Before it, memory is filled and the ranks meet;
after it, results are compared with what they have to be. Neither is timed. There are stretches
for so many seconds. Between two requests a rank waits for the socket, in no call of the package.
When the gate is gone, so is the rank.

Only names that the package promises to its users are used: this has to run with any version.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import phalanx
from phalanx import Backend

MOST_CALLS = 48  # in a stretch: sums grow by the number of ranks each time, and 4 ** 48 is exact
LEAST = 5  # stretches
TIMEOUT = 60.0  # seconds that an operation may take
WIDTH, DEPTH, BATCH, RATE = 256, 4, 8, 0.05  # of the training steps: 1 MiB of gradients
TOLERANCE = 1e-4  # of a loss; rounding makes 3e-7 of it in 6,000 steps


class Task(NamedTuple):
    """What can be repeated, and compared with what has to come of so many calls."""

    begin: Callable[[], object]
    call: Callable[[], object]
    right: Callable[[int], bool]


def pattern_of(nbytes: int) -> Tensor:
    """Small whole numbers."""
    return torch.arange(nbytes // 4, dtype=torch.float32).remainder_(13)


def all_reduce(backend: Backend, nbytes: int) -> Task:
    """The sum in place: each call multiplies what the first has made by the number of ranks."""
    size, pattern = backend.world_size, pattern_of(nbytes)
    own, total = pattern + (backend.rank + 1), size * pattern + size * (size + 1) / 2
    tensor = torch.empty_like(own)
    return Task(
        begin=lambda: tensor.copy_(own),
        call=lambda: phalanx.all_reduce_(tensor, backend),
        right=lambda calls: torch.equal(tensor, total * float(size) ** (calls - 1)),
    )


def send_recv(backend: Backend, nbytes: int) -> Task:
    """A message from rank 0 to rank 1, which counts in its first element, and back."""
    leads, pattern = backend.rank == 0, pattern_of(nbytes)
    tensor = pattern.clone()
    counter = tensor[:1]

    def call() -> None:
        if leads:
            backend.send(tensor, 1)
            backend.recv(tensor, 1)
        else:
            backend.recv(tensor, 0)
            counter.add_(1)
            backend.send(tensor, 0)

    def right(calls: int) -> bool:
        counter.sub_(calls)
        return torch.equal(tensor, pattern)

    return Task(lambda: tensor.copy_(pattern) if leads else tensor.zero_(), call, right)


def training(backend: Backend, wrap: Callable[[nn.Module], nn.Module]) -> Task:
    """Steps whose losses have to be those of one process that has all ranks' samples.

    The ranks have the same inputs and other targets. So a rank that learns by itself has another
    loss, and no loss comes near 0. Nothing in the model has a kink, at which rounding would grow.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
        )

    model, plain = wrap(make()), make()
    optimizer, reference = (torch.optim.SGD(one.parameters(), lr=RATE) for one in (model, plain))
    inputs, noise = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    targets = [noise + rank for rank in range(backend.world_size)]
    losses: list[Tensor] = []

    def call() -> None:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets[backend.rank])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())

    def right(calls: int) -> bool:
        expected = []
        for _ in range(calls):
            reference.zero_grad()
            output = plain(inputs)
            every = torch.stack([mse_loss(output, target) for target in targets])
            every.mean().backward()  # type: ignore[no-untyped-call]
            reference.step()
            expected.append(every[backend.rank].detach())
        return torch.allclose(torch.stack(losses), torch.stack(expected), rtol=TOLERANCE, atol=0)

    return Task(losses.clear, call, right)


TASKS: dict[str, Callable[[Backend, int], Task]] = {
    "all_reduce": all_reduce,
    "send_recv": send_recv,
    "ddp": lambda backend, _: training(backend, lambda model: phalanx.DDP(model, backend)),
    "fsdp": lambda backend, _: training(
        backend, lambda model: phalanx.FSDP(model, backend, unit=nn.Linear)
    ),
}


def measure(task: Task, backend: Backend, calls: int, seconds: float) -> float:
    """The seconds of a call on this rank: the median of stretches, `LEAST` of them at least."""
    found: list[float] = []
    elapsed = torch.zeros(1, dtype=torch.float64)
    started = perf_counter()
    while len(found) < LEAST or elapsed.item() < seconds:
        task.begin()
        elapsed.fill_(perf_counter() - started)
        phalanx.all_reduce_(elapsed, backend, phalanx.ReduceOp.MAX)  # all stop at the same stretch
        began = perf_counter()
        for _ in range(calls):
            task.call()
        found.append((perf_counter() - began) / calls)
        if not task.right(calls):
            raise AssertionError(f"rank {backend.rank} has a wrong result after {calls} calls")
    return statistics.median(found)


def stay_on_one_core(rank: int) -> None:
    """Ranks that share a core now and then take five times as long then: no two need to."""
    if hasattr(os, "sched_setaffinity"):  # Linux; it is about this thread, and leaves others free
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def main(address: str, name: str) -> None:
    """Be a rank, until the gate closes the connection."""
    torch.set_num_threads(1)
    tasks: dict[tuple[str, int], Task] = {}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)

        def tell(**message: Any) -> None:
            connection.sendall(json.dumps(message).encode() + b"\n")

        at_work = ""
        try:
            with phalanx.init(name, timeout=TIMEOUT) as backend, connection.makefile() as lines:
                stay_on_one_core(backend.rank)
                tell(file=phalanx.__file__)
                for line in lines:
                    asked = json.loads(line)
                    key = asked["task"], asked["nbytes"]
                    at_work = f"{key[0]} of {key[1]} bytes: "
                    if key not in tasks:
                        tasks[key] = TASKS[key[0]](backend, key[1])
                    taken = measure(tasks[key], backend, asked["calls"], asked["seconds"])
                    tell(seconds=taken)
        except Exception as error:
            tell(error=f"{at_work}{type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
