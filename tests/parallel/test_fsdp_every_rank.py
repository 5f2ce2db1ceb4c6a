"""Every rank calls the model, its units, its methods and optimizers: ranks that do not are named.

On every backend, and with every strategy, whether or not the call moves anything; and no message is
added for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_models import mlp, noise
from ddp_runs import outcome_of
from fsdp_runs import COMMON, FULL_SHARD, MESSAGES, NO_SHARD, SHARD_GRAD_OP, SHM, on_ranks
from torch import Tensor, nn

from phalanx import FSDP, Backend, DesyncError, ShardingStrategy

RANKS = 2
Step = Callable[[FSDP, torch.optim.Optimizer], object]


def evaluates(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        fsdp(noise(4, 6))


def gathers_the_state(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    fsdp.full_state_dict()


def summons(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with fsdp.summon_full_params(writeback=False):
        pass


def steps(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


ALONE: dict[str, Step] = {
    "FSDP.forward()": evaluates,
    "FSDP.full_state_dict()": gathers_the_state,
    "FSDP.summon_full_params()": summons,
    "FSDP begins step": steps,
}


def train(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    fsdp(noise(4, 6)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.checkered
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=str)
@pytest.mark.parametrize("where", [COMMON, MESSAGES, SHM], ids=["common", "messages", "shm"])
@pytest.mark.parametrize("what", ALONE)
def test_what_only_one_rank_does_is_named(strategy: Any, where: Cluster, what: str) -> None:
    def run(model: nn.Module, backend: Backend) -> str:
        fsdp = FSDP(model, backend, strategy=strategy)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)

        def program() -> None:
            train(fsdp, optimizer)
            if backend.rank == 0:
                ALONE[what](fsdp, optimizer)
            train(fsdp, optimizer)
            train(fsdp, optimizer)

        error = outcome_of(program)
        assert isinstance(error, DesyncError), error
        return str(error)

    for message in on_ranks(where, RANKS, mlp, run):
        assert what in message
        assert "rank 0" in message
        assert "rank 1" in message


class Chooses(nn.Module):
    """Two experts, of which a rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.experts[number](x)


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
def test_a_layer_that_only_some_ranks_use_says_what_to_pass(where: Cluster) -> None:
    def run(model: nn.Module, backend: Backend) -> str:
        fsdp = FSDP(model, backend)
        return str(outcome_of(lambda: fsdp(noise(4, 6), backend.rank).sum().backward()))

    for message in on_ranks(where, RANKS, Chooses, run):
        assert "pass a unit= around it that every rank calls" in message


@pytest.mark.parametrize("where", [COMMON, MESSAGES, SHM], ids=["common", "messages", "shm"])
def test_replicas_of_ranks_that_disagree_are_told_so_at_once(where: Cluster) -> None:
    """Ranks 2 and 3 agree with each other, and wait for the means of 0 and 1."""

    def run(model: nn.Module, backend: Backend) -> str:
        fsdp = FSDP(model, backend, strategy=ShardingStrategy.hybrid(2))
        backend.barrier()  # else the error may come while some still build it
        chosen = int(backend.rank == 1)
        error = outcome_of(lambda: fsdp(noise(4, 6), chosen).sum().backward())
        assert isinstance(error, DesyncError), error
        return str(error)

    for message in on_ranks(where, 4, Chooses, run):
        assert "experts." in message
        assert "pass a unit= around it that every rank calls" in message


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
def test_in_a_unit_that_all_call_ranks_use_other_layers(where: Cluster) -> None:
    def run(model: nn.Module, backend: Backend) -> list[Tensor]:
        fsdp = FSDP(model, backend, unit=Chooses)
        fsdp(torch.ones(4, 6), backend.rank).sum().backward()
        return [p.grad for p in fsdp.parameters() if p.grad is not None and p.grad.numel()]

    for gradients in on_ranks(where, RANKS, Chooses, run):
        assert all(torch.equal(g, torch.full_like(g, 2.0)) for g in gradients)


def test_a_mark_sends_nothing_and_waits_for_nobody() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            backend.mark("something")  # rank 1 is not there yet
            backend.send(torch.zeros(1), 1)
        else:
            backend.recv(torch.zeros(1), 0)
            backend.mark("something")
        backend.barrier()

    COMMON.run(run, RANKS)
    MESSAGES.run(run, RANKS)
