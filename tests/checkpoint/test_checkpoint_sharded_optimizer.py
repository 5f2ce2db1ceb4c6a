"""The state of a ShardedOptimizer: saved on any number of ranks, and loaded on any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import DDP, FSDP, Backend, ShardedOptimizer, ShardingStrategy
from phalanx.checkpoint import load_checkpoint, save_checkpoint
from phalanx.errors import CheckpointMismatchError

WRAPS: dict[str, Callable[[nn.Module, Backend], Any]] = {
    "DDP": DDP,
    "FSDP": FSDP,
    "hybrid": lambda m, b: FSDP(m, b, strategy=ShardingStrategy.hybrid(2)),
    "NO_SHARD": lambda m, b: FSDP(m, b, strategy="no_shard"),
}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
}


def build(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 1, bias=False))
    model.append(nn.Linear(1, 6, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Each rank has the whole batch, so that the mean over ranks is that of one process."""
    for number in steps:
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(inputs).pow(2).sum().backward()
        optimizer.step()


def whole(model: Any) -> list[Tensor]:
    state = model.full_state_dict() if isinstance(model, FSDP) else model.state_dict()
    return [value.detach().clone() for value in state.values()]


def plain(kind: str, steps: int) -> tuple[nn.Module, Any]:
    model = build()
    optimizer = KINDS[kind](model.parameters(), lr=0.02)
    train(model, optimizer, range(steps))
    return model, optimizer


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.checkered
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_it_goes_on_after_one_process_and_one_process_after_it(
    wrap: str, kind: str, folder: Path
) -> None:
    model, optimizer = plain(kind, 2)
    save_checkpoint(folder / "plain", model=model, optimizer=optimizer, step=2)
    expected = whole(plain(kind, 4)[0])

    def run(backend: Backend) -> list[Tensor]:
        sharded = WRAPS[wrap](build(seed=7), backend)
        optimizer = ShardedOptimizer(KINDS[kind], sharded, lr=77.0)
        load_checkpoint(folder / "plain", model=sharded, optimizer=optimizer)
        assert all(p in optimizer.owned for p in optimizer.state)
        train(sharded, optimizer, range(2, 3))
        save_checkpoint(folder / "sharded", model=sharded, optimizer=optimizer, step=3)
        train(sharded, optimizer, range(3, 4))
        return whole(sharded)

    for found in phalanx.simulate(run, 4):
        assert_close(found, expected)
    model, optimizer = build(seed=9), None
    optimizer = KINDS[kind](model.parameters(), lr=77.0)
    load_checkpoint(folder / "sharded", model=model, optimizer=optimizer)
    train(model, optimizer, range(3, 4))
    assert_close(whole(model), expected)


@pytest.mark.checkered
@pytest.mark.parametrize("ranks", [(2, 3), (3, 1), (1, 2), (4, 5)], ids=str)
@pytest.mark.parametrize("wraps", [("DDP", "FSDP"), ("FSDP", "DDP"), ("FSDP", "FSDP")], ids=str)
def test_it_goes_on_with_another_number_of_ranks_and_wrapper(
    wraps: tuple[str, str], ranks: tuple[int, int], folder: Path
) -> None:
    def run(backend: Backend, wrap: str, seed: int, steps: range) -> list[Tensor]:
        model = WRAPS[wrap](build(seed), backend)
        optimizer = ShardedOptimizer(torch.optim.Adafactor, model, lr=0.02)
        if seed:
            load_checkpoint(folder, model=model, optimizer=optimizer)
        train(model, optimizer, steps)
        save_checkpoint(folder, model=model, optimizer=optimizer, step=steps.stop)
        return whole(model)

    phalanx.simulate(lambda backend: run(backend, wraps[0], 0, range(2)), ranks[0])
    expected = whole(plain("Adafactor", 4)[0])
    for found in phalanx.simulate(lambda b: run(b, wraps[1], 5, range(2, 4)), ranks[1]):
        assert_close(found, expected)


def test_two_optimizers_of_one_model_and_another_kind(folder: Path) -> None:
    def run(backend: Backend) -> None:
        model = DDP(build(), backend)
        first, *rest = model.parameters()
        muon = ShardedOptimizer(torch.optim.Muon, model, groups=[first], lr=0.02)
        adam = ShardedOptimizer(torch.optim.AdamW, model, groups=rest, lr=0.02)
        for number in range(2):
            model(torch.ones(2, 5) * number).sum().backward()
            muon.step()
            adam.step()
        save_checkpoint(folder, model=model, optimizer=muon, step=2)
        with pytest.raises(CheckpointMismatchError, match="its optimizer is Muon"):
            load_checkpoint(folder, model=model, optimizer=adam)
        before = {p: muon.state[p]["momentum_buffer"].clone() for p in muon.state}
        muon.state.clear()
        load_checkpoint(folder, model=model, optimizer=muon)
        assert before.keys() == muon.state.keys()
        assert all(torch.equal(muon.state[p]["momentum_buffer"], t) for p, t in before.items())

    phalanx.simulate(run, 2)
