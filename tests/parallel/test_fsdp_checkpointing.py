"""Activation checkpointing: what is computed again in the backward pass finds its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import assert_close
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    SHARD_GRAD_OP,
    alone,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from phalanx import FSDP, Backend

RANKS = 2


class Block(nn.Module):
    """`inside`: it computes its own layers again, which are no groups."""

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__()
        self.inside = inside
        self.one = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.two = nn.Linear(8, 6)

    def compute(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.norm(self.one(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is None:
            return x + self.compute(x)
        return x + checkpoint(self.compute, x, use_reentrant=self.inside)


class Inside(nn.Module):
    """Checkpoints inside groups."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(reentrant) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Around(nn.Module):
    """A checkpoint around each group."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Several(Around):
    """One checkpoint around several groups, and one inside the other."""

    def pair(self, x: Tensor) -> Tensor:
        return self.blocks[1](checkpoint(self.blocks[0], x, use_reentrant=self.reentrant))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.pair, self.first(x), use_reentrant=self.reentrant)
        return self.blocks[2](self.blocks[0](x))


class InSequence(Around):
    def forward(self, x: Tensor) -> Tensor:
        layers = nn.Sequential(*self.blocks)
        return checkpoint_sequential(layers, 2, self.first(x), use_reentrant=self.reentrant)


MODELS: dict[str, Callable[[], nn.Module]] = {
    f"{kind.__name__}, {'' if reentrant else 'not '}reentrant": (
        lambda kind=kind, reentrant=reentrant: seeded(lambda: kind(reentrant))
    )
    for kind in (Inside, Around, Several, InSequence)
    for reentrant in (False, True)
}
WAYS = [(FULL_SHARD, COMMON), (FULL_SHARD, MESSAGES), (SHARD_GRAD_OP, COOPERATIVE)]
way = every_way(WAYS)


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(noise(4, 6, seed=rank)).pow(2).sum()


@pytest.mark.checkered
@pytest.mark.parametrize(
    ("strategy", "where", "unit"),
    [
        (FULL_SHARD, COMMON, None),
        (FULL_SHARD, MESSAGES, None),
        (FULL_SHARD, MESSAGES, nn.Linear),
        (SHARD_GRAD_OP, COOPERATIVE, nn.Linear),
    ],
    ids=["common", "messages", "messages, layers", "grad_op, layers"],
)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_gradients_are_those_of_the_plain_model(
    build: Callable[[], nn.Module], unit: Any, strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, unit=unit)
        for _ in range(2):
            fsdp.zero_grad()
            loss_of(fsdp, backend.rank).backward()
        return gradient_pieces(fsdp)

    losses = [lambda m, r=rank: loss_of(m, r) for rank in range(RANKS)]
    assert_close(joined(on_ranks(where, RANKS, build, body)), alone(build, losses))


@way
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_fsdp_may_be_inside_a_checkpoint(reentrant: bool, strategy: Any, where: Any):
    build = lambda: seeded(Block)  # noqa: E731

    def loss(model: nn.Module, rank: int) -> Tensor:
        x = noise(4, 6, seed=rank).requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).pow(2).sum()

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            loss(fsdp, backend.rank).backward()
            optimizer.step()
        return gradient_pieces(fsdp)

    losses = [lambda m, r=rank: loss(m, r) for rank in range(RANKS)]
    assert_close(joined(on_ranks(where, RANKS, build, body)), alone(build, losses))


@way
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_error_while_it_is_computed_again_reaches_the_caller_and_training_goes_on(
    reentrant: bool, strategy: Any, where: Any
):
    build = MODELS[f"Around, {'' if reentrant else 'not '}reentrant"]

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        loss = loss_of(fsdp, backend.rank)

        def fail(*_: Any) -> None:
            raise ArithmeticError("a bad batch")

        handle = model.blocks[1].norm.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            loss.backward()
        handle.remove()
        fsdp.zero_grad()
        loss_of(fsdp, backend.rank).backward()
        return gradient_pieces(fsdp)

    losses = [lambda m, r=rank: loss_of(m, r) for rank in range(RANKS)]
    assert_close(joined(on_ranks(where, RANKS, build, body)), alone(build, losses))
