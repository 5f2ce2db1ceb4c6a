"""Training with every strategy is training in one process on the joined batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from clusters import Hybrid
from ddp_models import TASKS, images, loss_of, seeded
from ddp_runs import assert_close, assert_same_bits, rows_of, values
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    SHM,
    STRATEGIES,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, ReduceOp, ShardingStrategy, all_reduce, convert_sync_batchnorm

STEPS = 4
ROWS = 3  # of each rank
Optimizer = Callable[[Any], torch.optim.Optimizer]

# A larger eps: with the default, Adam makes noise of gradients that are zero visible.
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3, momentum=0.5),
}


class NormalizedConvNet(nn.Module):
    """Its batch norms see the samples of all ranks, once they are converted."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)
        )
        self.head = nn.Linear(2 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.view(-1, 1, 6, 6))).flatten(1))


MODELS: dict[str, Any] = {
    **{name: (lambda b=build: b(0).train(), batch) for name, (build, batch) in TASKS.items()},
    "batch norm": (lambda: seeded(NormalizedConvNet), images),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    inputs, targets = batch
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_alone(task: str, make: Optimizer, rows: int) -> tuple[list[float], Any]:
    build, batch = MODELS[task]
    model = build()
    optimizer = make(model.parameters())
    losses = [step(model, optimizer, batch(rows, seed)).item() for seed in range(STEPS)]
    return losses, values(model)


def train_on_ranks(
    task: str, make: Optimizer, strategy: ShardingStrategy, cluster: Any, size: int, **options: Any
) -> list[tuple[list[float], Any]]:
    build, batch = MODELS[task]

    def body(model: nn.Module, backend: Backend) -> tuple[list[float], Any]:
        if task == "batch norm":
            model = convert_sync_batchnorm(model, backend)
        fsdp = FSDP(model, backend, strategy=strategy, **options)
        optimizer = make(fsdp.parameters())
        losses = []
        for number in range(STEPS):
            mine = tuple(rows_of(part, backend) for part in batch(ROWS * size, number))
            losses.append(all_reduce(step(fsdp, optimizer, mine), backend, ReduceOp.MEAN).item())
        return losses, fsdp.full_state_dict()

    return on_ranks(cluster, size, build, body)


def assert_trained_alike(ranks: list[tuple[list[float], Any]], alone: tuple[list[float], Any]):
    for losses, parameters in ranks:
        assert losses == pytest.approx(alone[0], rel=1e-4, abs=1e-6)
        assert_close(parameters, alone[1], rtol=1e-4, atol=1e-5)
    assert_same_bits([parameters for _, parameters in ranks])


HYBRID = ShardingStrategy.hybrid
CASES = [  # ranks, strategy, where, model: each pair of the last three is there
    (1, FULL_SHARD, COOPERATIVE, "mlp"),
    (1, SHARD_GRAD_OP, MESSAGES, "tied transformer"),
    (1, NO_SHARD, COMMON, "batch norm"),
    (2, FULL_SHARD, MESSAGES, "tied transformer"),
    (2, SHARD_GRAD_OP, SHM, "batch norm"),
    (2, NO_SHARD, MESSAGES, "defined backwards"),
    (2, HYBRID(1), COMMON, "mlp"),
    (3, FULL_SHARD, COMMON, "convnet"),
    (3, SHARD_GRAD_OP, COOPERATIVE, "mlp"),
    (3, NO_SHARD, COOPERATIVE, "tied transformer"),
    (3, FULL_SHARD, SHM, "mlp"),
    (4, FULL_SHARD, COOPERATIVE, "batch norm"),
    (4, FULL_SHARD, Hybrid(), "tied transformer"),
    (4, SHARD_GRAD_OP, MESSAGES, "convnet"),
    (4, SHARD_GRAD_OP, COMMON, "defined backwards"),
    (4, NO_SHARD, SHM, "mlp"),
    (4, HYBRID(2), COOPERATIVE, "tied transformer"),
    (4, HYBRID(2), MESSAGES, "batch norm"),
    (4, HYBRID(4), COMMON, "convnet"),
    (5, FULL_SHARD, MESSAGES, "batch norm"),
    (5, SHARD_GRAD_OP, COMMON, "tied transformer"),
    (6, HYBRID(2), Hybrid(), "mlp"),
    (6, HYBRID(3), COMMON, "batch norm"),
    (6, NO_SHARD, COOPERATIVE, "convnet"),
    (7, FULL_SHARD, COMMON, "tied transformer"),
    (7, SHARD_GRAD_OP, MESSAGES, "mlp"),
    (8, FULL_SHARD, MESSAGES, "mlp"),
    (8, SHARD_GRAD_OP, COOPERATIVE, "tied transformer"),
    (8, HYBRID(4), MESSAGES, "defined backwards"),
    (8, FULL_SHARD, COMMON, "batch norm"),
]
ROUND = [(*case, name) for case, name in zip(CASES, cycle(["SGD", "AdamW, fused"]), strict=False)]


@pytest.mark.parametrize(
    ("size", "strategy", "where", "task", "optimizer"),
    ROUND,
    ids=[f"{n}-{s}-{c.name}-{t}-{o}" for n, s, c, t, o in ROUND],
)
def test_training_over_ranks_equals_training_in_one_process(
    size: int, strategy: ShardingStrategy, where: Any, task: str, optimizer: str
):
    make = OPTIMIZERS[optimizer]
    ranks = train_on_ranks(task, make, strategy, where, size)
    assert_trained_alike(ranks, train_alone(task, make, ROWS * size))


@pytest.mark.parametrize(
    ("optimizer", "strategy"), [*zip(OPTIMIZERS, cycle(STRATEGIES), strict=False)]
)
def test_it_does_so_with_every_elementwise_optimizer(optimizer: str, strategy: ShardingStrategy):
    make = OPTIMIZERS[optimizer]
    ranks = train_on_ranks("tied transformer", make, strategy, COMMON, 3)
    assert_trained_alike(ranks, train_alone("tied transformer", make, ROWS * 3))


@pytest.mark.parametrize(
    ("unit", "prefetch", "where"),
    [
        (nn.Linear, 0, COMMON),
        (nn.Linear, 3, MESSAGES),
        ((nn.Sequential, nn.LayerNorm, nn.Linear), 2, COMMON),
        ((nn.Sequential, nn.LayerNorm, nn.Linear), 0, MESSAGES),
    ],
    ids=["layers", "layers, ahead", "nested, ahead", "nested"],
)
def test_how_the_model_is_cut_and_what_is_prefetched_changes_nothing(
    unit: Any, prefetch: int, where: Any
):
    make = OPTIMIZERS["SGD"]
    ranks = train_on_ranks(
        "tied transformer", make, FULL_SHARD, where, 2, unit=unit, prefetch=prefetch
    )
    assert_trained_alike(ranks, train_alone("tied transformer", make, ROWS * 2))


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP], ids=str)
def test_the_order_in_which_ranks_run_changes_no_bit(strategy: ShardingStrategy):
    make = OPTIMIZERS["Adam"]
    runs = [train_on_ranks("mlp", make, strategy, COOPERATIVE, 3) for _ in range(3)]
    assert_same_bits([parameters for run in runs for _, parameters in run])
