"""What ranks are doing when something happens to one of them: generators, one step at a time.

Every rank runs the same generator with the same random numbers, so that they agree. Each step's
results are checked: whatever happens, a wrong number must never be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from time import sleep

import torch
from torch import Tensor
from waiting import wait_until

import phalanx
from phalanx import Backend

ALGORITHMS = ("ring", "direct", "tree", "halving_doubling", "star")
LARGE = 16 << 20  # float32 numbers: 64 MiB
Traffic = Callable[[Backend, Random], Iterator[None]]


def check(tensor: Tensor, expected: float) -> None:
    """The whole of a small tensor, and samples of a large one."""
    sample = tensor.flatten()[:: max(1, tensor.numel() // 1000)]
    if not bool((sample == expected).all()):
        raise AssertionError(f"expected {expected} everywhere, got {sample}")


def total(backend: Backend) -> float:
    """The sum of what the ranks contribute, each its rank + 1."""
    return backend.world_size * (backend.world_size + 1) / 2


def all_reduce(backend: Backend, random: Random) -> Iterator[None]:
    """Sums of all sizes up to 1 MiB, with every algorithm."""
    while True:
        size = random.choice((1, 100, 5_000, 250_000))
        mine = torch.full((size,), backend.rank + 1.0)
        algorithm = random.choice(ALGORITHMS)
        check(phalanx.all_reduce(mine, backend, algorithm=algorithm), total(backend))
        yield


def collectives(backend: Backend, random: Random) -> Iterator[None]:
    """Every other collective."""
    ranks = backend.world_size
    while True:
        size = random.choice((1, 100, 10_000))
        root = random.randrange(ranks)
        mine = torch.full((ranks * size,), backend.rank + 1.0)
        which = random.randrange(5)
        if which == 0:
            check(phalanx.broadcast(mine, backend, root=root), root + 1.0)
        elif which == 1:
            gathered = phalanx.all_gather(mine, backend).reshape(ranks, -1)
            for rank in range(ranks):
                check(gathered[rank], rank + 1.0)
        elif which == 2:
            check(phalanx.reduce_scatter(mine, backend), total(backend))
        elif which == 3:
            came = phalanx.all_to_all(mine, backend).reshape(ranks, -1)
            for rank in range(ranks):
                check(came[rank], rank + 1.0)
        else:
            backend.barrier()
        yield


def asynchronous(backend: Backend, random: Random) -> Iterator[None]:
    """Several under way at a time, with some computing before they are waited for."""
    while True:
        mine = [torch.full((20_000,), backend.rank + 1.0) for _ in range(4)]
        pending = [phalanx.async_all_reduce(tensor, backend) for tensor in mine]
        sleep(random.random() / 100)
        for each in pending:
            check(each.wait(), total(backend))
        yield


def unattended(backend: Backend, random: Random) -> Iterator[None]:
    """One sum under way that nobody waits for; some ranks are late with it."""
    while True:
        sleep(random.random() / 50 * backend.rank)
        pending = phalanx.async_all_reduce(torch.full((9,), backend.rank + 1.0), backend)
        wait_until(pending.done, pause=0.02)
        check(pending.wait(), total(backend))
        yield


def messages(backend: Backend, random: Random) -> Iterator[None]:
    """Messages around the ring, both ways at once and one after the other."""
    right = (backend.rank + 1) % backend.world_size
    left = (backend.rank - 1) % backend.world_size
    while True:
        into = torch.empty(random.choice((1, 50_000)))
        mine = torch.full_like(into, backend.rank + 1.0)
        tag = random.randrange(3)
        if random.random() < 0.5:
            backend.sendrecv(mine, right, into, left, tag=tag)
        else:
            backend.send(mine, right, tag=tag)
            backend.recv(into, left, tag=tag)
        check(into, left + 1.0)
        yield


def between_calls(backend: Backend, random: Random) -> Iterator[None]:
    """Much computing, few calls: most of the time nobody is in one."""
    while True:
        sleep(0.05 + random.random() / 20)
        backend.barrier()
        yield


def large(backend: Backend, random: Random) -> Iterator[None]:
    """64 MiB at a time: sums, and messages."""
    right = (backend.rank + 1) % backend.world_size
    left = (backend.rank - 1) % backend.world_size
    mine, into = torch.empty(LARGE), torch.empty(LARGE)
    while True:
        mine.fill_(backend.rank + 1.0)
        if random.random() < 0.5:
            check(phalanx.all_reduce_(mine, backend), total(backend))
        else:
            backend.sendrecv(mine, right, into, left)
            check(into, left + 1.0)
        yield


def subgroups(backend: Backend, random: Random) -> Iterator[None]:
    """Sums in either half of the ranks, then among all."""
    half = backend.world_size // 2
    members = range(half) if backend.rank < half else range(half, backend.world_size)
    group = backend.subgroup(members)
    while True:
        size = random.choice((10, 10_000))
        for each in (group, group, backend):
            check(phalanx.all_reduce(torch.full((size,), each.rank + 1.0), each), total(each))
        yield


def training(backend: Backend, random: Random) -> Iterator[None]:
    """Like a training step: computing, 8 MiB of gradients in the background, a word on the loss."""
    weights = torch.rand(256, 256)
    while True:
        buckets = [torch.full((512 << 10,), backend.rank + 1.0) for _ in range(4)]
        pending = []
        for bucket in buckets:
            (weights @ weights).sum().item()
            pending.append(phalanx.async_all_reduce_(bucket, backend))
        for each in pending:
            check(each.wait(), total(backend))
        check(phalanx.all_reduce(torch.tensor([backend.rank + 1.0]), backend), total(backend))
        yield


TRAFFIC: dict[str, Traffic] = {
    traffic.__name__: traffic
    for traffic in (
        all_reduce,
        collectives,
        asynchronous,
        unattended,
        messages,
        between_calls,
        large,
        subgroups,
        training,
    )
}
