"""What FSDP holds, as the kernel counts it, in processes of their own.

Freed memory is given back to the system at once there: what is measured is what is held, and not
what the C library keeps in reserve.
"""

from __future__ import annotations

import pytest
import torch
from given_back import give_back
from ranks import beside, run_ranks
from torch import nn

from phalanx import FSDP, Backend, ShardingStrategy, SharedMemoryBackend, TcpBackend
from phalanx.ops.bench.peaks import Meter, gives_back, lacks_peaks

LAYERS, WIDTH = 16, 1024
GROUP = WIDTH * WIDTH * 4
PARAMETERS = LAYERS * GROUP
RANKS = 2
IN_FLIGHT = 4 * GROUP  # one that computes, its gradients, one that comes, one in a reduce-scatter
TENTH = 1.1

PART_OF_ALL = 4 * PARAMETERS / RANKS  # parameters, gradients, two moments of Adam
PART_OF_THE_REST = PARAMETERS + 3 * PARAMETERS / RANKS
HELD = [
    ("tcp", ShardingStrategy.FULL_SHARD, PART_OF_ALL),
    ("tcp", ShardingStrategy.SHARD_GRAD_OP, PART_OF_THE_REST),
    ("shm", ShardingStrategy.FULL_SHARD, PART_OF_ALL),  # common memory counts by halves
]

WHY_NOT = lacks_peaks() or ("" if gives_back() else "the C library is not glibc")


def peak(backend: Backend, strategy: ShardingStrategy) -> int:
    """Bytes that a rank holds at most while a model is built, and trained with Adam."""
    small = nn.Sequential(nn.Linear(4, 4, bias=False))
    train(FSDP(small, backend, strategy=strategy), 4)  # what is loaded once is there
    backend.barrier()
    meter = Meter()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    train(FSDP(model, backend, strategy=strategy), WIDTH)
    backend.barrier()
    held = meter.peak()
    backend.barrier()
    return held


def train(model: FSDP, width: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()


def each_peak(tcp: Backend) -> list[int]:
    """One after the other; what a model held has been given back when the next is measured."""
    give_back()
    with beside(tcp, SharedMemoryBackend) as shm:
        backends = {"tcp": tcp, "shm": shm}
        return [peak(backends[name], strategy) for name, strategy, _ in HELD]


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be measured")
def test_a_strategy_holds_its_part_and_the_groups_in_flight() -> None:
    for rank, (how, peaks) in enumerate(run_ranks(each_peak, RANKS, kind=TcpBackend, timeout=100)):
        assert how == "returned", peaks
        for held, (name, strategy, part) in zip(peaks, HELD, strict=True):
            bound = (part + IN_FLIGHT) * TENTH
            found = f"{held >> 20} of {int(bound) >> 20} MiB"
            assert held <= bound, f"{strategy} over {name}, rank {rank}: {found}"
