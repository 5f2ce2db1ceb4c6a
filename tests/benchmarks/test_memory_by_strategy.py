"""The formulas of docs/choose.md for the memory of a rank, beside what the kernel counts.

A model of blocks with a head that is in no unit is trained with each strategy, in processes that
give freed memory back at once. It is measured as by `phalanx bench fsdp --peaks`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from given_back import give_back
from ranks import beside, run_ranks
from torch import Tensor, nn

import phalanx
from phalanx import Backend, ShardingStrategy, SharedMemoryBackend, TcpBackend
from phalanx.ops.bench.peaks import Meter, gives_back, lacks_peaks

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from memory import FORMULAS, Job, peak

BLOCKS, WIDTH = 5, 512
MATRIX = 4 * WIDTH * WIDTH  # bytes
BUCKET = 4 * MATRIX
RANKS, OF_HYBRID = 2, 4
LEAST, MOST = 0.75, 1.25  # of what the formula says
MOST_COMPRESSED = 1.4  # differs from run to run

WHY_NOT = lacks_peaks() or ("" if gives_back() else "the C library is not glibc")


class Block(nn.Module):
    """A unit of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x))
        return x + down


class Model(nn.Module):
    """Blocks, and a head of two matrices' size that is in no unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
        self.head = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(x))
        return scores


def job(ranks: int) -> Job:
    """The letters of the formulas for this model."""
    both = 2 * MATRIX
    n = (BLOCKS + 1) * both  # which is less than the bucket of an average
    return Job(n, m=both, u=both, r=both, p=ranks, g=2, c=BUCKET, d=n)


Wrap = Callable[[nn.Module, Backend], nn.Module]


def fsdp(strategy: ShardingStrategy | str, plain: nn.Module, backend: Backend) -> nn.Module:
    return phalanx.FSDP(plain, backend, unit=Block, strategy=strategy)


def ddp(plain: nn.Module, backend: Backend) -> nn.Module:
    return phalanx.DDP(plain, backend, bucket_size=BUCKET)


def with_residual(plain: nn.Module, backend: Backend) -> nn.Module:
    kept = phalanx.ErrorFeedback(phalanx.TopK(0.01))
    return phalanx.DDP(plain, backend, bucket_size=BUCKET, compression=kept)


def diloco(plain: nn.Module, backend: Backend) -> nn.Module:
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    return phalanx.DiLoCo(plain, backend, every=1, outer=outer)


WRAPPERS: Mapping[str, Wrap] = MappingProxyType(
    {
        "one process": lambda plain, _: plain,
        "`DDP`": ddp,
        "`DDP`, `ShardedOptimizer`": ddp,
        "`no_shard`": partial(fsdp, "no_shard"),
        "`shard_grad_op`": partial(fsdp, "shard_grad_op"),
        "`full_shard`": partial(fsdp, "full_shard"),
        "`hybrid`": partial(fsdp, ShardingStrategy.hybrid(2)),
        "shared memory": partial(fsdp, "full_shard"),
        "`LocalSGD`": lambda plain, backend: phalanx.LocalSGD(plain, backend, every=1),
        "`DiLoCo`": diloco,
        "`ErrorFeedback`": with_residual,
    }
)


def train(name: str, backend: Backend, width: int, meter: Meter | None = None) -> None:
    """Train for three steps; the meter begins anew before the last, when all memory is there."""
    model = WRAPPERS[name](Model(width), backend)
    adamw = torch.optim.AdamW
    optimizer = (
        phalanx.ShardedOptimizer(adamw, model)
        if "ShardedOptimizer" in name
        else adamw(model.parameters())
    )
    for number in range(3):
        if meter is not None and number == 2:
            backend.barrier()
            meter.reset()
            backend.barrier()
        model(torch.ones(2, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_in(backend: Backend, name: str) -> int:
    """The most bytes that this rank has had in a step."""
    meter = Meter()
    train(name, backend, WIDTH, meter)
    backend.barrier()
    held = meter.peak()
    backend.barrier()  # before anybody frees what others share
    return held


def peaks(tcp: Backend, names: list[str]) -> dict[str, int]:
    """One strategy after the other; only one of them in shared memory, which keeps what it had."""
    give_back()
    gc.freeze()  # each meter collects garbage: not all of torch again
    torch.set_num_threads(1)
    with beside(tcp, SharedMemoryBackend) as shm:
        for name in names[::4]:  # what is loaded and connected once is there
            train(name, tcp, 4)
        return {name: peak_in(shm if name == "shared memory" else tcp, name) for name in names}


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be measured")
@pytest.mark.parametrize("ranks", [RANKS, OF_HYBRID])
def test_the_formula_of_a_strategy_is_the_peak_of_a_rank_to_a_quarter(ranks: int) -> None:
    names = [name for name in WRAPPERS if (name == "`hybrid`") == (ranks == OF_HYBRID)]
    for rank, (how, found) in enumerate(run_ranks(peaks, ranks, names, kind=TcpBackend)):
        assert how == "returned", found
        print(*(f"{n}: {f / peak(n, job(ranks)):.2f}" for n, f in found.items()), sep="\n")
        for name, held in found.items():
            said = peak(name, job(ranks))
            words = f"{held / MATRIX:.1f} and not {said / MATRIX:.1f} MiB"
            most = MOST_COMPRESSED if name == "`ErrorFeedback`" else MOST
            assert LEAST * said <= held <= most * said, f"{name}, rank {rank}: {words}"


def test_every_formula_is_measured() -> None:
    assert list(WRAPPERS) == list(FORMULAS)
