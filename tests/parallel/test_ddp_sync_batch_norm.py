"""SyncBatchNorm inside DDP: training on parts of a batch is training on the whole of it."""

from __future__ import annotations

import pytest
import torch
from ddp_models import loss_of, noise, seeded
from ddp_runs import assert_close, assert_same_bits, gradients, over_tcp, values
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from phalanx import DDP, Backend, simulate
from phalanx.parallel import convert_sync_batchnorm

EXACT = {"rtol": 1e-9, "atol": 1e-10}


class ConvNet(nn.Module):
    """Batch norms in 2d and 1d, with statistics of the batch."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.mix = nn.Linear(16, 5)
        self.norm_again = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)
        self.reentrant = reentrant

    def part(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x.view(-1, 1, 6, 6))))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            x = self.part(x)
        else:
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        x = self.mix(F.avg_pool2d(x, 2).flatten(1))
        return self.head(torch.tanh(self.norm_again(x)))


def build(reentrant: bool | None = None) -> nn.Module:
    return seeded(lambda: ConvNet(reentrant)).double()


def batch(number: int, rows: int) -> tuple[Tensor, Tensor]:
    return noise(rows, 36, seed=number).double(), noise(rows, 3, seed=500 + number).double()


def cut(shares, rank, *tensors):
    start = sum(shares[:rank])
    return [tensor[start : start + shares[rank]] for tensor in tensors]


def train(model: nn.Module, step) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        step(number)
        optimizer.step()


def plain_run(rows: int, reentrant: bool | None = None):
    model = build(reentrant)

    def step(number: int) -> None:
        x, y = batch(number, rows)
        loss_of(model(x.requires_grad_()), y).backward()

    train(model, step)
    return values(model), gradients(model)


def ddp_run(
    backend: Backend, shares, reentrant: bool | None = None, *, model=None, apart=False, **options
):
    everyone = backend.subgroup(range(backend.world_size)) if apart else backend
    ddp = DDP(convert_sync_batchnorm(model or build(reentrant), everyone), backend, **options)

    def step(number: int) -> None:
        x, y = cut(shares, backend.rank, *batch(number, sum(shares)))
        ddp.weighted(loss_of(ddp(x.clone().requires_grad_()), y), len(x)).backward()

    train(ddp, step)
    return values(ddp), gradients(ddp)


@pytest.mark.checkered
@pytest.mark.parametrize("apart", [False, True], ids=["same group", "group of its own"])
@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
@pytest.mark.parametrize("shares", [(4, 4), (5, 2), (3, 0, 4), (0, 6)], ids=str)
def test_training_on_unequal_parts_equals_training_on_the_joined_batch(shares, bucket_size, apart):
    ranks = list(
        simulate(
            lambda backend: ddp_run(backend, shares, apart=apart, bucket_size=bucket_size),
            len(shares),
        )
    )
    state, grads = plain_run(sum(shares))
    for mine, own_grads in ranks:
        assert_close(mine, state, **EXACT)
        assert_close(own_grads, grads, **EXACT)
    assert_same_bits([own_grads for _, own_grads in ranks])


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_running_statistics_are_the_same_on_every_rank_without_any_broadcast(broadcast_buffers):
    ranks = list(simulate(lambda b: ddp_run(b, (3, 1, 4), broadcast_buffers=broadcast_buffers), 3))
    assert_same_bits([state for state, _ in ranks])


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("seed", range(2))
def test_what_a_checkpoint_runs_again_stays_in_step(reentrant: bool, bucket_size: int, seed: int):
    shares = (3, 1, 2)
    ranks = list(
        simulate(
            lambda backend: ddp_run(backend, shares, reentrant, bucket_size=bucket_size), 3, seed
        )
    )
    state, grads = plain_run(6, reentrant)
    for mine, own_grads in ranks:
        assert_close(mine, state, **EXACT)
        assert_close(own_grads, grads, **EXACT)


@pytest.mark.parametrize("apart", [False, True], ids=["same group", "group of its own"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "recompute"])
def test_it_trains_over_tcp(apart: bool, reentrant: bool | None):
    shares = (4, 0, 3)
    models = [build(reentrant) for _ in shares]  # seeds are the process's: not in threads

    def run(backend: Backend):
        return ddp_run(backend, shares, model=models[backend.rank], apart=apart, bucket_size=200)

    state, _ = plain_run(7, reentrant)
    for mine, _ in over_tcp(run, 3):
        assert_close(mine, state, **EXACT)


def test_groups_train_beside_each_other():
    def run(backend: Backend):
        mine = backend.subgroup([0, 2] if backend.rank in (0, 2) else [1, 3])
        return ddp_run(mine, (4, 3))

    state, _ = plain_run(7)
    for mine, _ in simulate(run, 4):
        assert_close(mine, state, **EXACT)


def test_a_group_of_its_own_lets_ranks_use_different_parameters():
    """On one group, buckets of ranks that skip a branch would meet the others' statistics."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.left = nn.Linear(4, 2)
            self.right = nn.Linear(4, 2)

        def forward(self, x: Tensor, name: str) -> Tensor:
            return getattr(self, name)(torch.tanh(self.norm(self.first(x))))

    def build() -> nn.Module:
        return seeded(Branching).double()

    def run(backend: Backend):
        everyone = backend.subgroup(range(2))
        model = convert_sync_batchnorm(build(), everyone)
        ddp = DDP(model, backend, bucket_size=1, find_unused_parameters=True)
        for number in range(3):
            ddp.zero_grad()
            x = noise(4, 4, seed=10 * number + backend.rank).double()
            ddp(x, ["left", "right"][(backend.rank + number) % 2]).pow(2).sum().backward()
        return gradients(ddp)

    plain = build()
    x = [noise(4, 4, seed=20 + rank).double() for rank in range(2)]
    hidden = torch.tanh(plain.norm(plain.first(torch.cat(x))))
    losses = plain.left(hidden[:4]).pow(2).sum() + plain.right(hidden[4:]).pow(2).sum()
    (losses / 2).backward()
    for found in simulate(run, 2):
        assert_close(found, gradients(plain), **EXACT)
