"""Training that is saved with one strategy and number of ranks goes on with another, as if nothing
had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    ShardingStrategy,
    SimulatedBackend,
    load_checkpoint,
    save_checkpoint,
    simulate,
)

ROWS, BEFORE, AFTER = 24, 2, 2


class Tied(nn.Module):
    """Two layers that share a weight, and shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.middle = nn.Linear(5, 5, bias=False)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.middle.weight
        self.register_buffer("offset", torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.middle(torch.tanh(self.up(x + self.offset)))))


def model() -> Tied:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tied()


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step))


class Way(NamedTuple):
    """How a model is split, and over how many ranks."""

    name: str
    ranks: int
    wrap: Callable[[nn.Module, Backend], nn.Module]


def sharded(name: str, ranks: int, strategy: ShardingStrategy) -> Way:
    return Way(name, ranks, lambda module, backend: FSDP(module, backend, strategy=strategy))


WAYS = [
    Way("plain", 1, lambda module, backend: module),
    Way("ddp", 3, DDP),
    sharded("full_shard", 1, ShardingStrategy.FULL_SHARD),
    sharded("full_shard", 3, ShardingStrategy.FULL_SHARD),
    sharded("full_shard", 8, ShardingStrategy.FULL_SHARD),
    sharded("shard_grad_op", 2, ShardingStrategy.SHARD_GRAD_OP),
    sharded("no_shard", 2, ShardingStrategy.NO_SHARD),
    sharded("hybrid", 4, ShardingStrategy.hybrid(2)),
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
}


def train(
    wrapped: nn.Module, optimizer: torch.optim.Optimizer, steps: range, backend: Backend
) -> None:
    share = ROWS // backend.world_size
    for step in steps:
        rows = batch(step)[backend.rank * share : (backend.rank + 1) * share]
        optimizer.zero_grad()
        wrapped(rows).square().mean().backward()
        optimizer.step()


def full_state(wrapped: nn.Module) -> dict[str, Tensor]:
    return wrapped.full_state_dict() if isinstance(wrapped, FSDP) else wrapped.state_dict()


def run_to_the_end(optimizer: str) -> dict[str, Tensor]:
    plain = model()
    [backend] = SimulatedBackend.create_group(1)
    train(plain, OPTIMIZERS[optimizer](plain.parameters()), range(BEFORE + AFTER), backend)
    return plain.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("of", WAYS, ids=lambda way: f"{way.name} on {way.ranks}")
def test_training_goes_on_with_any_strategy_and_number_of_ranks(
    of: Way, optimizer: str, tmp_path: Path
) -> None:
    expected = run_to_the_end(optimizer)

    def begin(backend: Backend) -> None:
        wrapped = of.wrap(model(), backend)
        made = OPTIMIZERS[optimizer](wrapped.parameters())
        train(wrapped, made, range(BEFORE), backend)
        save_checkpoint(tmp_path, model=wrapped, optimizer=made, step=BEFORE, backend=backend)

    def go_on(backend: Backend) -> dict[str, Tensor]:
        wrapped = to.wrap(model(), backend)
        made = OPTIMIZERS[optimizer](wrapped.parameters())
        loaded = load_checkpoint(tmp_path, model=wrapped, optimizer=made, backend=backend)
        assert loaded.step == BEFORE
        train(wrapped, made, range(BEFORE, BEFORE + AFTER), backend)
        return full_state(wrapped)

    simulate(begin, of.ranks)
    for to in WAYS:
        for state in simulate(go_on, to.ranks):
            assert list(state) == list(expected)
            for name, value in expected.items():
                torch.testing.assert_close(
                    state[name], value, rtol=1e-4, atol=1e-6, msg=f"{name}, to {to}"
                )


def test_loading_waits_for_ranks_that_still_read(tmp_path: Path) -> None:
    """Where full parameters exist once for all ranks, a checkpoint is written into them."""

    def run(backend: Backend) -> None:
        wrapped = FSDP(model(), backend)
        save_checkpoint(tmp_path, model=wrapped, step=0)
        before = wrapped(batch(0))
        train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), range(2), backend)
        assert not torch.equal(wrapped(batch(0)), before)
        load_checkpoint(tmp_path, model=wrapped)
        assert torch.equal(wrapped(batch(0)), before)
        assert torch.equal(wrapped(batch(0)), before)

    for seed in range(4):
        simulate(run, 3, seed=seed)
