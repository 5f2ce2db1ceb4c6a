"""Full parameters that exist once per host: who reads them never sees them half written.

Each weight is the number of steps so far. Where ranks run one at a time, one that writes too early
does so before another one has even begun to read, so it shows each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from clusters import CLUSTERS
from torch import Tensor, nn

from phalanx import FSDP, Backend, CollectiveTimeoutError, ShardingStrategy, simulate

STEPS = 4
SEEDS = range(8)
GATHERING = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


class Counter(nn.Module):
    """Two layers of weights, which it returns; the gradient of each weight is -1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Weights(7)
        self.second = Weights(5)

    def forward(self) -> Tensor:
        return torch.cat([self.first(), self.second()])


class Weights(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self) -> Tensor:
        return self.weight * 1


def build(backend: Backend, **options: object) -> tuple[FSDP, torch.optim.Optimizer]:
    model = FSDP(Counter(), backend, **options)  # type: ignore[arg-type]
    assert all(flat.common for flat in model._runtime.flats)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def step(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (-model().sum()).backward()
    optimizer.step()


@torch.no_grad()
def reads(model: FSDP) -> list[float]:
    """The different weights that a forward pass finds."""
    return model().unique().tolist()


@pytest.mark.checkered
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", GATHERING, ids=str)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["", "mixed precision"])
def test_evaluation_before_a_step_is_over_on_all_ranks_before_one_writes(
    seed: int, strategy: ShardingStrategy, dtype: torch.dtype | None
) -> None:
    def run(backend: Backend) -> None:
        model, optimizer = build(backend, strategy=strategy, mixed_precision=dtype)
        for done in range(STEPS):
            optimizer.zero_grad()
            (-model().sum()).backward()
            assert reads(model) == [done]
            assert reads(model) == [done]
            optimizer.step()
        assert reads(model) == [STEPS]

    simulate(run, 3, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_pass_that_reduced_nothing_a_step_waits_all_the_same(seed: int) -> None:
    def run(backend: Backend) -> None:
        model, optimizer = build(backend)
        for done in range(STEPS):
            optimizer.zero_grad()
            (-model().sum()).backward()
            with model.no_sync():
                outputs = model()
                assert outputs.unique().tolist() == [done]
                (0 * outputs).sum().backward()
            optimizer.step()

    simulate(run, 2, seed=seed)


def fill_while_writing(model: FSDP, value: float) -> None:
    with model.writing(), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def fill_summoned(model: FSDP, value: float) -> None:
    with model.summon_full_params(), torch.no_grad():
        model.module.first.weight.fill_(value)
        model.module.second.weight.fill_(value)


WRITERS: dict[str, Callable[[FSDP, float], object]] = {
    "load_state_dict": lambda model, value: model.load_state_dict(
        {name: torch.full(shape, value) for name, (shape, *_) in model.slices().items()}
    ),
    "update_shards": lambda model, value: model.update_shards(
        torch.full((sum(p.numel() for p in model.parameters()),), value)
    ),
    "writing": fill_while_writing,
    "summon_full_params": fill_summoned,
}


@pytest.mark.checkered
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_way_to_write_waits_for_those_that_read(writer: str, seed: int) -> None:
    def run(backend: Backend) -> None:
        model, _ = build(backend)
        assert reads(model) == [0]
        for value in (3.0, 4.0):
            WRITERS[writer](model, value)
            assert reads(model) == [value]
            assert reads(model) == [value]

    simulate(run, 3, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_by_hand_after_a_backward_pass_is_noticed(seed: int) -> None:
    def run(backend: Backend) -> None:
        model, _ = build(backend)
        for done in range(STEPS):
            outputs = model()
            assert outputs.unique().tolist() == [done]
            (-outputs.sum()).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
                    parameter.grad = None

    simulate(run, 3, seed=seed)


@pytest.mark.parametrize("name", ["simulated", "shm", "sub of shm"])
def test_ranks_that_run_freely_never_see_two_steps_at_once(name: str) -> None:
    cluster = next(cluster for cluster in CLUSTERS if cluster.name == name)

    def run(backend: Backend) -> None:
        model, optimizer = build(backend)
        for done in range(60):
            step(model, optimizer)
            for _ in range(done % 3):  # by as many passes one may be ahead
                assert reads(model) == [done + 1]

    cluster.run(run, 3)


def test_a_rank_that_does_not_step_is_named() -> None:
    everybody_ended = threading.Barrier(2)

    def run(backend: Backend) -> None:
        model, optimizer = build(backend)
        (-model().sum()).backward()
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="rank 1") as raised:
                optimizer.step()
            assert "before step" in str(raised.value)
        everybody_ended.wait(30)

    cluster = next(cluster for cluster in CLUSTERS if cluster.name == "simulated")
    cluster.run(run, 2, timeout=0.5)


def test_the_full_parameters_of_all_ranks_are_the_same_memory() -> None:
    def run(backend: Backend) -> list[float]:
        model, _ = build(backend)
        flat = model._runtime.flats[0]
        flat.unsharded[backend.rank] = 1 + backend.rank
        backend.barrier()
        return flat.unsharded[:3].tolist()

    assert simulate(run, 3) == [[1, 2, 3]] * 3
