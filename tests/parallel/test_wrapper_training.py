"""Training with every wrapper is training in one process on the joined batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from clusters import Hybrid
from ddp_models import TASKS, images, loss_of, seeded
from ddp_runs import assert_close, assert_same_bits, rows_of, values
from forms import sizes
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    SHM,
    STRATEGIES,
)
from torch import Tensor, nn
from wrappings import Wrapping

from phalanx import (
    DDP,
    FSDP,
    Backend,
    ReduceOp,
    ShardingStrategy,
    all_reduce,
    clip_grad_norm_,
    convert_sync_batchnorm,
    simulate,
)

STEPS = sizes(3, 5)
ROWS = 3  # of each rank
Optimizer = Callable[[Any], torch.optim.Optimizer]
Trained = tuple[list[float], dict[str, Tensor]]  # losses, and the whole model's state

# A larger eps: with the default, Adam makes noise of gradients that are zero visible.
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
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
    **{
        name: (lambda seed=0, b=build: b(seed).train(), batch)
        for name, (build, batch) in TASKS.items()
    },
    "batch norm": (lambda seed=0: seeded(NormalizedConvNet, seed), images),
}


def step(
    model: Any, optimizer: torch.optim.Optimizer, batch: Any, clip: float | None = None
) -> Tensor:
    inputs, targets = batch
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    if clip is not None and isinstance(model, FSDP):
        clip_grad_norm_(model, clip)
    elif clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach()


def train_alone(task: str, make: Optimizer, rows: int, clip: float | None = None) -> Trained:
    build, batch = MODELS[task]
    model = build()
    optimizer = make(model.parameters())
    losses = [step(model, optimizer, batch(rows, seed), clip).item() for seed in range(STEPS)]
    return losses, values(model)


def train_on_ranks(
    task: str,
    make: Optimizer,
    wrap: Wrapping,
    ranks: int,
    *,
    clip: float | None = None,
    seed: int | None = None,
) -> list[Trained]:
    """seed   of the order in which ranks run, one at a time; None: where `wrap` says"""
    build, batch = MODELS[task]
    models = [build(rank) for rank in range(ranks)]  # each starts elsewhere: rank 0's counts

    def run(backend: Backend) -> Trained:
        model = models[backend.rank]
        if task == "batch norm":
            model = convert_sync_batchnorm(model, backend)
        before = list(model.parameters())
        wrapped = wrap(model, backend)
        optimizer = make(wrapped.parameters())
        losses = []
        for number in range(STEPS):
            mine = tuple(rows_of(part, backend) for part in batch(ROWS * ranks, number))
            loss = step(wrapped, optimizer, mine, clip)
            losses.append(all_reduce(loss, backend, ReduceOp.MEAN).item())
        assert all(a is b for a, b in zip(before, wrapped.parameters(), strict=True))
        return losses, wrap.state(wrapped)

    return wrap.cluster.run(run, ranks) if seed is None else list(simulate(run, ranks, seed))


def assert_trained_alike(ranks: list[Trained], alone: Trained) -> None:
    for losses, parameters in ranks:
        assert losses == pytest.approx(alone[0], rel=1e-4, abs=1e-6)
        assert_close(parameters, alone[1], rtol=1e-4, atol=1e-5)
    assert_same_bits([parameters for _, parameters in ranks])


def fsdp(strategy: ShardingStrategy, where: Any = COOPERATIVE, **options: Any) -> Wrapping:
    return Wrapping(FSDP, {"strategy": strategy, **options}, where)


def ddp(where: Any = COOPERATIVE, **options: Any) -> Wrapping:
    return Wrapping(DDP, options, where)


HYBRID = ShardingStrategy.hybrid
SHARDED = [  # ranks, strategy, where, model: each pair of the last three is there
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
OVER_TCP = [  # ranks, bucket size, model: each pair is there of 2 and 3 ranks, and of the last two
    (1, 1, "mlp"),
    (2, 1, "convnet"),
    (2, 1 << 20, "mlp"),
    (2, 1 << 20, "tied transformer"),
    (2, 1, "defined backwards"),
    (3, 1, "mlp"),
    (3, 1, "tied transformer"),
    (3, 1 << 20, "convnet"),
    (3, 1 << 20, "defined backwards"),
]
CASES = [
    *((ranks, ddp(), task, "SGD") for ranks in range(1, 5) for task in TASKS),
    *((ranks, ddp(where), "batch norm", "SGD") for ranks, where in ((2, SHM), (3, MESSAGES))),
    *((ranks, ddp(MESSAGES, bucket_size=size), task, "Adam") for ranks, size, task in OVER_TCP),
    *(
        (ranks, fsdp(strategy, where), task, optimizer)
        for (ranks, strategy, where, task), optimizer in zip(
            SHARDED, cycle(["SGD", "AdamW, fused"]), strict=False
        )
    ),
]


@pytest.mark.parametrize(("ranks", "wrap", "task", "optimizer"), CASES, ids=str)
def test_training_over_ranks_equals_training_in_one_process(
    ranks: int, wrap: Wrapping, task: str, optimizer: str
):
    make = OPTIMIZERS[optimizer]
    trained = train_on_ranks(task, make, wrap, ranks)
    assert_trained_alike(trained, train_alone(task, make, ROWS * ranks))


@pytest.mark.checkered
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_ddp_does_so_with_every_optimizer_and_clipped_gradients(task: str, optimizer: str):
    make = OPTIMIZERS[optimizer]
    trained = train_on_ranks(task, make, ddp(bucket_size=100), 3, clip=0.05)
    assert_trained_alike(trained, train_alone(task, make, ROWS * 3, 0.05))


@pytest.mark.checkered
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    ("optimizer", "strategy"), [*zip(OPTIMIZERS, cycle(STRATEGIES), strict=False)]
)
def test_fsdp_does_so_with_every_elementwise_optimizer(
    optimizer: str, strategy: ShardingStrategy, clip: float | None
):
    make = OPTIMIZERS[optimizer]
    trained = train_on_ranks("tied transformer", make, fsdp(strategy, COMMON), 3, clip=clip)
    assert_trained_alike(trained, train_alone("tied transformer", make, ROWS * 3, clip))


NESTED = (nn.Sequential, nn.LayerNorm, nn.Linear)


@pytest.mark.parametrize(
    ("ranks", "wrap"),
    [
        *((4, ddp(bucket_size=size)) for size in (1, 100, 400, 1 << 30)),
        (2, fsdp(FULL_SHARD, COMMON, unit=nn.Linear, prefetch=0)),
        (2, fsdp(FULL_SHARD, MESSAGES, unit=nn.Linear, prefetch=3)),
        (2, fsdp(FULL_SHARD, COMMON, unit=NESTED, prefetch=2)),
        (2, fsdp(FULL_SHARD, MESSAGES, unit=NESTED, prefetch=0)),
    ],
    ids=str,
)
def test_how_the_model_is_cut_and_what_is_prefetched_changes_the_result_by_rounding_only(
    ranks: int, wrap: Wrapping
):
    make = OPTIMIZERS["SGD"]
    trained = train_on_ranks("tied transformer", make, wrap, ranks)
    assert_trained_alike(trained, train_alone("tied transformer", make, ROWS * ranks))


@pytest.mark.parametrize(
    ("wrap", "task"),
    [*((ddp(), task) for task in TASKS), (fsdp(FULL_SHARD), "mlp"), (fsdp(SHARD_GRAD_OP), "mlp")],
    ids=str,
)
def test_the_order_in_which_ranks_run_changes_no_bit(wrap: Wrapping, task: str):
    make = OPTIMIZERS["Adam"]
    runs = [train_on_ranks(task, make, wrap, 3, clip=0.05, seed=seed) for seed in range(4)]
    assert_same_bits([parameters for run in runs for _, parameters in run])
    assert all(run[0][0] == runs[0][0][0] for run in runs)


def test_an_optimizer_that_was_made_before_ddp_trains_the_same_parameters():
    build, batch = TASKS["mlp"]

    def run(backend: Backend) -> bool:
        model = build(backend.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = [p.data_ptr() for p in model.parameters()]
        wrapped = DDP(model, backend)
        before = values(model)
        step(wrapped, optimizer, batch(4, backend.rank))
        assert memory == [p.data_ptr() for p in wrapped.parameters()]
        return all(not torch.equal(before[name], value) for name, value in values(model).items())

    assert list(simulate(run, 2)) == [True, True]
