"""Ranks that train in one group, and then, with the same models, in another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from clusters import Cluster
from ddp_models import loss_of, seeded
from fsdp_runs import COOPERATIVE, MESSAGES
from local_runs import nesterov
from torch import Tensor, nn

import phalanx
from phalanx import (
    DDP,
    FSDP,
    Backend,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    PowerSGD,
    Quantized,
    ShardedOptimizer,
    ShardingStrategy,
    SimulatedBackend,
    TopK,
    convert_sync_batchnorm,
)
from phalanx.core.replaceable import ReplaceableBackend


class Net(nn.Module):
    """A tied weight, buffers, a frozen parameter, and sizes that do not divide."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5, sparse=not tied)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 5, bias=False))
        self.head = nn.Linear(5, 7)
        if tied:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.look: Callable[[Tensor], object] = lambda hidden: None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens) * self.scale)
        self.look(hidden)
        return self.head(hidden + self.frozen)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sharded(model: nn.Module) -> torch.optim.Optimizer:
    return ShardedOptimizer(torch.optim.AdamW, model, lr=0.05)


class Way(NamedTuple):
    """A wrapper with its options, the model in it, and how steps are taken, on which ranks."""

    wrap: Callable[[nn.Module, Backend], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    make: Callable[[], nn.Module] = Net
    step: Callable[[Rank, int], None] | None = None
    cluster: Cluster = COOPERATIVE


class Rank(NamedTuple):
    """What a process keeps from one group to the next."""

    way: Way
    backend: ReplaceableBackend
    model: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def new(cls, way: Way, inner: Backend | None = None) -> Rank:
        """One on this backend, or by itself."""
        backend = ReplaceableBackend(inner or SimulatedBackend.create_group(1)[0])
        model = way.wrap(seeded(way.make), backend)
        return cls(way, backend, model, way.optimizer(model))

    def enter(self, inner: Backend) -> Rank:
        self.backend.enter(inner)
        self.model.regrouped()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.regrouped()
        return self

    def step(self, number: int) -> None:
        (self.way.step or take_step)(self, number)

    def save(self, folder: Path) -> Rank:
        phalanx.save_checkpoint(folder, model=self.model, optimizer=self.optimizer, step=0)
        return self

    def load(self, folder: Path) -> Rank:
        phalanx.load_checkpoint(folder, model=self.model, optimizer=self.optimizer)
        return self

    def state(self) -> dict[str, Any]:
        """All that this rank has, by name; copies."""
        state: dict[str, Any] = {
            "slices": self.model.slices(),
            "bytes_sent": self.model.bytes_sent,
            "own": {key: value.clone() for key, value in self.model.own_state().items()},
            "buffers": {name: b.clone() for name, b in self.model.module.named_buffers()},
        }
        for name, p in self.model.named_parameters():
            kept = self.optimizer.state.get(p, {})
            state[name] = p.detach().clone()
            state[f"gradient of {name}"] = None if p.grad is None else p.grad.to_dense().clone()
            state[f"optimizer's {name}"] = {key: value.clone() for key, value in kept.items()}
        return state


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + number)
    tokens = torch.randint(7, (2, 4), generator=draw)
    return tokens[0], tokens[1]


def take_step(rank: Rank, number: int) -> None:
    """A step on the batch that this rank has in this step."""
    inputs, targets = batch(rank.backend.rank, number)
    rank.optimizer.zero_grad()
    loss_of(rank.model(inputs), targets).backward()
    rank.optimizer.step()


def take_joined_step(rank: Rank, number: int) -> None:
    """A step in which rank 0 has two micro-batches, and the last of several ranks none."""
    here, ranks = rank.backend.rank, rank.backend.world_size
    count = 2 if here == 0 else int(here < ranks - 1)
    rank.optimizer.zero_grad()
    with rank.model.step(float(4 * count), micro_batches=count) as step:
        for part in range(count):
            inputs, targets = batch(here, 10 * number + part)
            step.backward(loss_of(rank.model(inputs), targets) * 4)
    rank.optimizer.step()


def first_group(way: Way, ranks: int, folder: Path) -> Sequence[Rank]:
    """Ranks that have trained, and saved a checkpoint."""

    def train(inner: Backend) -> Rank:
        rank = Rank.new(way, inner)
        for number in range(3):
            rank.step(number)
        return rank.save(folder)

    return way.cluster.run(train, ranks)


def assert_equal(found: Any, expected: Any, what: str = "") -> None:
    """They are the same bits, in containers, too."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_equal(found[key], value, f"{what} {key}")
    elif isinstance(expected, Tensor):
        assert found.dtype is expected.dtype, what
        assert torch.equal(found, expected), f"{what}: {found} is not {expected}"
    else:
        assert found == expected, what


# The table ----------------------------------------------------------------------------------------


def ddp(**options: Any) -> Way:
    return Way(partial(DDP, **options))


def fsdp(strategy: ShardingStrategy | str = "full_shard", **options: Any) -> Way:
    return Way(partial(FSDP, strategy=strategy, **options))


def synchronized(model: nn.Module, backend: Backend) -> DDP:
    return DDP(convert_sync_batchnorm(model, backend), backend)


TOP = ErrorFeedback(TopK(0.2))
COARSE = ErrorFeedback(Quantized(bits=4))
HYBRID = ShardingStrategy.hybrid(2)
SPARSE = Way(DDP, sgd, partial(Net, tied=False))

WAYS = {
    "ddp": ddp(bucket_size=64),
    "ddp-unused": ddp(find_unused_parameters=True, reproducible=True),
    "ddp-checked": ddp(skip_nonfinite=True, check_replicas_every=2, broadcast_buffers=False),
    "ddp-sparse": SPARSE,
    "ddp-sync-batch-norm": Way(synchronized),
    "ddp-top-k": ddp(compression=TOP),
    "ddp-quantized": ddp(compression=COARSE),
    "ddp-power-sgd": ddp(compression=ErrorFeedback(PowerSGD(2))),
    "ddp-joined-steps": Way(DDP, step=take_joined_step),
    "ddp-sharded-optimizer": Way(DDP, sharded),
    "full-shard": fsdp(),
    "full-shard-sharded-optimizer": Way(FSDP, sharded),
    "full-shard-linears": fsdp(unit=nn.Linear, prefetch=2),
    "full-shard-bfloat16": fsdp(mixed_precision=torch.bfloat16),
    "full-shard-top-k": fsdp(compression=TOP),
    "full-shard-joined-steps": Way(FSDP, step=take_joined_step),
    "full-shard-messages": fsdp()._replace(cluster=MESSAGES),
    "shard-grad-op": fsdp("shard_grad_op", mixed_precision=torch.bfloat16),
    "shard-grad-op-messages": fsdp("shard_grad_op")._replace(cluster=MESSAGES),
    "no-shard": fsdp("no_shard"),
    "no-shard-top-k": fsdp("no_shard", compression=TOP),
    "hybrid": fsdp(HYBRID),
    "hybrid-sharded-optimizer": fsdp(HYBRID)._replace(optimizer=sharded),
    "hybrid-top-k": fsdp(HYBRID, compression=TOP),
    "local-sgd": Way(partial(LocalSGD, every=2, start_after=1)),
    "local-sgd-top-k": Way(partial(LocalSGD, every=2, compression=TopK(0.2))),
    "diloco": Way(partial(DiLoCo, every=2, outer=nesterov)),
    "diloco-quantized": Way(partial(DiLoCo, every=2, outer=nesterov, compression=COARSE)),
}
