"""Buffers: rank 0's at the start of each training forward pass; nobody else's business in eval."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import Watched, assert_same_bits, values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import DDP, Backend, simulate


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Kinds(nn.Module):
    """Buffers of many dtypes and shapes, one of which is not in the state, and one that is None."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        for number, dtype in enumerate([torch.float32, torch.float64, torch.int64, torch.uint8]):
            self.register_buffer(f"of_{number}", torch.full((2, 3), fill, dtype=dtype).t())
        self.register_buffer("flag", torch.tensor(fill % 2 == 1))
        self.register_buffer("hidden", torch.full((2,), float(fill)), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def spread(model: nn.Module, rank: int) -> None:
    """Let the buffers of each rank be others."""
    for buffer in model.buffers():
        buffer.fill_(rank)


def test_buffers_of_every_kind_are_rank_0_s_after_building():
    def run(backend: Backend):
        return buffers(DDP(Kinds(5 + backend.rank), backend))

    ranks = list(simulate(run, 3))
    assert_same_bits([*ranks, buffers(Kinds(5))])


def test_in_training_a_forward_pass_begins_with_rank_0_s_buffers():
    def run(backend: Backend):
        ddp = DDP(Kinds(0), backend)
        identity = [id(buffer) for buffer in ddp.buffers()]
        spread(ddp, backend.rank + 1)
        ddp(torch.ones(2))
        assert identity == [id(buffer) for buffer in ddp.buffers()]
        return buffers(ddp)

    ranks = list(simulate(run, 3))
    assert_same_bits(ranks)
    assert (ranks[2]["of_2"] == 1).all()


@pytest.mark.parametrize("case", ["broadcast_buffers=False", "eval", "no_sync"])
def test_otherwise_each_rank_keeps_its_own_and_nothing_is_sent(case: str):
    def run(backend: Backend) -> Iterator[bool]:
        ddp = DDP(Kinds(0), backend, broadcast_buffers=case != "broadcast_buffers=False")
        ddp.train(case != "eval")
        spread(ddp, backend.rank + 1)
        watched = Watched(backend)
        if case == "no_sync":
            with ddp.no_sync():
                ddp(torch.ones(2))
        else:
            ddp(torch.ones(2))
        assert watched.events == []
        return bool((ddp.module.of_0 == backend.rank + 1).all())

    assert list(simulate(run, 3)) == [True] * 3


def test_one_rank_alone_may_evaluate():
    def run(backend: Backend) -> list[int] | None:
        ddp = DDP(Normed(), backend)
        ddp(noise(4, 6, seed=backend.rank)).sum().backward()
        shape = None
        if backend.rank == 1:
            ddp.eval()
            with torch.no_grad():
                shape = list(ddp(noise(4, 6)).shape)
            ddp.train()
        ddp(noise(4, 6, seed=backend.rank)).sum().backward()
        return shape

    assert list(simulate(run, 3)) == [None, [4, 2], None]


def test_batch_norm_trains_with_rank_0_s_statistics():
    def run(backend: Backend):
        ddp = DDP(seeded(Normed), backend)
        for number in range(3):
            ddp(noise(4, 6, seed=10 * number + backend.rank)).pow(2).sum().backward()
        after = values(ddp)
        ddp.broadcast_parameters()
        return after, values(ddp)

    plain = seeded(Normed)
    for number in range(3):
        plain(noise(4, 6, seed=10 * number))
    ranks = list(simulate(run, 3))
    assert_same_bits([synced for _, synced in ranks])
    assert torch.equal(ranks[2][1]["norm.running_mean"], plain.norm.running_mean)
    assert ranks[2][1]["norm.num_batches_tracked"] == 3
    # The last pass of each rank saw its own rows.
    assert not torch.equal(ranks[0][0]["norm.running_mean"], ranks[1][0]["norm.running_mean"])


def test_batch_norm_allows_two_forward_passes_before_one_backward_pass():
    def run(backend: Backend):
        ddp = DDP(seeded(Normed), backend)
        first, second = (ddp(noise(4, 6, seed=s + backend.rank)) for s in (0, 10))
        (first.pow(2).sum() + second.pow(2).sum()).backward()
        return {name: p.grad.clone() for name, p in ddp.named_parameters()}

    assert_same_bits(list(simulate(run, 2)))


def test_buffers_that_a_module_makes_later_are_broadcast_too():
    def run(backend: Backend) -> float:
        ddp = DDP(nn.Linear(2, 2), backend)
        ddp.module.register_buffer("late", torch.tensor(float(backend.rank + 7)))
        ddp(torch.ones(1, 2))
        return ddp.module.late.item()

    assert list(simulate(run, 3)) == [7.0] * 3


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_forward_pass_that_a_checkpoint_runs_again_broadcasts_nothing(reentrant: bool):
    def run(backend: Backend) -> list[str]:
        ddp = DDP(seeded(Normed), backend)
        ddp(noise(4, 6)).sum().backward()
        watched = Watched(backend)
        x = noise(4, 6, seed=backend.rank).requires_grad_()
        checkpoint(ddp, x, use_reentrant=reentrant).pow(2).sum().backward()
        return [event.split()[0] for event in watched.events]

    for events in simulate(run, 2):
        assert events == ["broadcast", "broadcast", "all_reduce"]  # two dtypes of buffers
