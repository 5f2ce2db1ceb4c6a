"""Steps of a joined batch in a test, and the one process that has all of it.

A split says what each rank has: the rows of each of its micro-batches. `[[2, 1], [], [3]]` is a
step of six rows, in which rank 1 has nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ddp_models import mlp, noise
from ddp_runs import Gradients, gradients
from fsdp_runs import COOPERATIVE, FULL_SHARD, MESSAGES, NO_SHARD
from torch import Tensor, nn
from torch.nn import functional as F
from wrappings import Wrapping, every_wrapping

from phalanx import DDP, FSDP

Split = Sequence[Sequence[int]]
Build = Callable[[], nn.Module]
WITH_DDP = Wrapping(DDP, {"bucket_size": 1}, COOPERATIVE)
SHARDED = Wrapping(FSDP, {"strategy": FULL_SHARD}, COOPERATIVE)
BY_MESSAGES = Wrapping(FSDP, {"strategy": FULL_SHARD}, MESSAGES)
REPLICATED = Wrapping(FSDP, {"strategy": NO_SHARD}, COOPERATIVE)
few = every_wrapping(among=[WITH_DDP, SHARDED, BY_MESSAGES])
both = every_wrapping(among=[WITH_DDP, SHARDED])

SPLITS = [
    [[], [], [2]],
    [[2, 1], [3, 3, 1], [1]],
    [[1], [4], [2]],
    [[3, 0, 1], [0], []],
    [[0], [], [1, 2]],
]
UNEVEN = [[2, 1], [], [1, 3, 2]]
ROUNDING = 1e-12  # of the norm of a gradient, in double precision


def build() -> nn.Module:
    return mlp().double()


def batch(rank: int, number: int, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank's micro-batch."""
    seed = 100 * rank + number
    return noise(rows, 6, seed=seed).double(), noise(rows, 3, seed=seed + 5000).double()


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="sum") / 3


def loss_on(model: Any, rank: int, number: int, rows: int) -> Tensor:
    x, y = batch(rank, number, rows)
    return sum_of_losses(model(x), y)


LossOn = Callable[[Any, int, int, int], Tensor]


def take_step(
    model: Any, rank: int, split: Split, *, shift: int = 0, loss: LossOn = loss_on
) -> Any:
    """One step on a rank. `shift` gives the micro-batches other numbers, and so other values."""
    own = split[rank]
    with model.step(sum(own), micro_batches=len(own)) as step:
        for number, rows in enumerate(own):
            step.backward(loss(model, rank, shift + number, rows))
    return step


def alone(model: Any, split: Split, *, shift: int = 0, loss: LossOn = loss_on) -> Tensor:
    """The backward pass of one process; adds to gradients. Returns the loss."""
    total = sum(map(sum, split))
    losses = [
        loss(model, rank, shift + number, rows) / total
        for rank, own in enumerate(split)
        for number, rows in enumerate(own)
        if rows
    ]
    whole = torch.stack(losses).sum()
    whole.backward()
    return whole.detach()


def assert_equal_to_rounding(found: Gradients, expected: Gradients, bound: float = ROUNDING):
    """norm of the difference / norm of the expected value, for each tensor."""
    assert list(found) == list(expected)
    for name, right in expected.items():
        value = found[name]
        if right is None or value is None:
            assert value is right, f"{name}: only one of the two has a gradient"
            continue
        off = (value.to_dense() - right.to_dense()).norm() / right.to_dense().norm().clamp(1e-30)
        assert off <= bound, f"{name} is off by {off:.2g}"


def gradients_of_steps(
    wrap: Wrapping, split: Split, *, make: Build = build, take: Any = take_step, **options: Any
) -> list[Gradients]:
    """The whole gradients after one step."""
    ranks = len(split)
    return wrap.gradients(ranks, make, lambda model, rank: take(model, rank, split), **options)


def gradients_alone(split: Split, make: Any = build, **options: Any) -> Gradients:
    plain = make()
    alone(plain, split, **options)
    return gradients(plain)
