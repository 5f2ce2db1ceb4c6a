"""torch.compile of a sharded model, and of what is sharded: as the plain model without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import assert_close
from fsdp_runs import COOPERATIVE, FULL_SHARD, MESSAGES, NO_SHARD, joined, on_ranks, value_pieces
from torch import Tensor, nn
from torch._dynamo.utils import counters

from phalanx import FSDP, Backend

RANKS = 2
BACKEND = "aot_eager"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build() -> nn.Module:
    return seeded(lambda: nn.Sequential(Block(), Block(), nn.Linear(6, 3)))


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_outside(module: nn.Module, wrap: Any) -> tuple[nn.Module, nn.Module]:
    wrapped = wrap(module)
    return wrapped, torch.compile(wrapped, backend=BACKEND)


def compiled_inside(module: nn.Module, wrap: Any) -> tuple[nn.Module, nn.Module]:
    module.compile(backend=BACKEND)
    wrapped = wrap(module)
    return wrapped, wrapped


def compiled_by_block(module: nn.Module, wrap: Any) -> tuple[nn.Module, nn.Module]:
    for block in module:
        block.compile(backend=BACKEND)
    wrapped = wrap(module)
    return wrapped, wrapped


def train(model: nn.Module, called: nn.Module, ranks: list[int]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for number in range(3):
        for rank in ranks:
            x = noise(4, 6, seed=10 * number + rank)
            (called(x).pow(2).mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.checkered
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at all of it
@pytest.mark.parametrize("way", [compiled_outside, compiled_inside, compiled_by_block])
@pytest.mark.parametrize(
    ("strategy", "where"),
    [(FULL_SHARD, COOPERATIVE), (FULL_SHARD, MESSAGES), (NO_SHARD, COOPERATIVE)],
    ids=["full, common", "full, messages", "no_shard"],
)
def test_units_are_compiled_and_train_like_one_process(strategy: Any, where: Any, way: Any) -> None:
    def run(module: nn.Module, backend: Backend) -> Any:
        model, called = way(module, lambda m: FSDP(m, backend, strategy=strategy))
        train(model, called, [backend.rank])
        return value_pieces(model)

    plain = build()
    train(plain, plain, [0, 1])
    found = joined(on_ranks(where, RANKS, build, run))
    assert_close(
        found, {name: p.detach() for name, p in plain.named_parameters()}, rtol=1e-4, atol=1e-5
    )
    assert counters["stats"]["unique_graphs"] >= 3  # of both blocks, and of the last layer
