"""What FSDP holds, as the kernel counts it, in processes of their own.

Freed memory is given back to the system at once there: what is measured is what is held, and not
what the C library keeps in reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from phalanx import FSDP, Backend, ShardingStrategy, spawn
from phalanx.tools.bench.rank import GIVES_BACK, Meter, gives_back, lacks_peaks

LAYERS, WIDTH = 16, 1024
GROUP = WIDTH * WIDTH * 4
PARAMETERS = LAYERS * GROUP
RANKS = 2
IN_FLIGHT = 4 * GROUP  # one that computes, its gradients, one that comes, one in a reduce-scatter
TENTH = 1.1
STRATEGIES = {
    "tcp": [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
    "shm": [ShardingStrategy.FULL_SHARD],
}
Peaks = Callable[[str, ShardingStrategy], list[int]]

WHY_NOT = lacks_peaks() or ("" if gives_back() else "the C library is not glibc")

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be measured")


def peak(backend: Backend, strategy: ShardingStrategy) -> int:
    """Bytes that a rank holds at most while a model is built, and trained with Adam."""
    torch.set_num_threads(1)
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


def each_peak(backend: Backend, strategies: list[ShardingStrategy]) -> list[int]:
    """One after the other; what a model held has been given back when the next is measured."""
    return [peak(backend, strategy) for strategy in strategies]


@pytest.fixture(scope="module")
def peaks() -> Iterator[Peaks]:
    """Of each rank, on this backend. All strategies are measured in the same processes."""
    measured: dict[str, list[list[int]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in GIVES_BACK.items():
            patch.setenv(name, value)

        def peaks(backend: str, strategy: ShardingStrategy) -> list[int]:
            strategies = STRATEGIES[backend]
            if backend not in measured:
                run = partial(each_peak, strategies=strategies)
                measured[backend] = spawn(run, RANKS, backend=backend)
            return [held[strategies.index(strategy)] for held in measured[backend]]

        yield peaks


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_full_shard_holds_its_part_of_everything_and_the_groups_in_flight(
    peaks: Peaks, backend: str
) -> None:
    """Parameters, gradients, two moments of Adam. Common memory counts by halves."""
    bound = (4 * PARAMETERS / RANKS + IN_FLIGHT) * TENTH
    for held in peaks(backend, ShardingStrategy.FULL_SHARD):
        assert held <= bound, f"{held >> 20} of {int(bound) >> 20} MiB"


def test_shard_grad_op_holds_all_parameters_and_its_part_of_the_rest(peaks: Peaks) -> None:
    bound = (PARAMETERS + 3 * PARAMETERS / RANKS + IN_FLIGHT) * TENTH
    for held in peaks("tcp", ShardingStrategy.SHARD_GRAD_OP):
        assert held <= bound, f"{held >> 20} of {int(bound) >> 20} MiB"
