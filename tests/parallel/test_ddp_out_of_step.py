"""Ranks of which one leaves something out: each is told, in DDP's words, what it looks like."""

from __future__ import annotations

import pytest
import torch
from clusters import Cluster, Simulated
from ddp_models import noise
from ddp_runs import outcome_of
from torch import nn

from phalanx import DDP, Backend, CollectiveTimeoutError, DesyncError, MisuseError, simulate


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))


def backward(ddp: nn.Module, rank: int) -> None:
    ddp(noise(4, 6, seed=rank)).pow(2).sum().backward()


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("how", ["another loss", "no backward"])
def test_a_loss_that_does_not_touch_the_outputs_is_explained_at_the_next_forward_pass(culprit, how):
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(normed(), backend)
        backward(ddp, backend.rank)
        backend.barrier()

        def steps() -> None:
            if backend.rank == culprit:
                ddp(noise(4, 6))
                if how == "another loss":
                    torch.ones((), requires_grad=True).mul(2).backward()
            else:
                backward(ddp, backend.rank)
            backward(ddp, backend.rank)

        return outcome_of(steps)

    for rank, error in enumerate(simulate(run, 3)):
        assert isinstance(error, DesyncError)
        assert "DDP's buffers, at a forward pass" in str(error)
        if rank == culprit:
            assert "on this rank a forward pass was followed by no averaging" in str(error)
        else:
            assert "another one does something else" in str(error)
            assert "its loss does not depend on the model's outputs" in str(error)


def test_it_is_explained_on_every_kind_of_backend(cluster: Cluster):
    def run(backend: Backend) -> str:
        ddp = DDP(normed(), backend)

        def steps() -> None:
            backend.barrier()
            if backend.rank == 1:
                ddp(noise(4, 6))
            else:
                backward(ddp, backend.rank)
            backward(ddp, backend.rank)

        error = outcome_of(steps)
        assert isinstance(error, DesyncError), error
        return str(error)

    texts = cluster.run(run, 2)
    assert "another one does something else" in texts[0]
    assert "on this rank a forward pass was followed by no averaging" in texts[1]


@pytest.mark.timeouts
@pytest.mark.together
def test_a_rank_whose_batches_run_out_is_pointed_to_join(cluster: Cluster):
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(nn.Linear(6, 2), backend)
        backward(ddp, 0)
        return None if backend.rank == 1 else outcome_of(lambda: backward(ddp, 0))

    error = cluster.run(run, 2, timeout=0.5)[0]
    assert isinstance(error, CollectiveTimeoutError)
    assert "DDP.join" in str(error)
    assert (error.peer, error.op) == (1, "all_reduce")


def test_a_refusal_of_one_rank_is_the_error_of_all():
    """It is not a disagreement, and gets no explanation of one."""

    def refuse(backend: Backend) -> BaseException | None:
        ddp = DDP(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), backend)
        backend.barrier()
        ddp.module.forward = ddp.module[0].forward if backend.rank else _both(ddp.module)
        return outcome_of(lambda: backward(ddp, 0))

    for error in simulate(refuse, 2):
        assert isinstance(error, MisuseError)
        assert "1.weight" in str(error)
        assert "another one does something else" not in str(error)


def _both(module: nn.Module):
    return lambda x: module[0](x) + module[1](x)


@pytest.mark.requires("agreement")  # else the library says it, in its words
def test_a_rank_that_ran_out_of_batches_and_left_is_explained(cluster: Cluster):
    def run(backend: Backend) -> str:
        ddp = DDP(nn.Linear(6, 4), backend)
        backward(ddp, backend.rank)
        if backend.rank == 1:
            if cluster.name != "cooperative":
                backend.close()
            return ""
        return str(outcome_of(lambda: backward(ddp, backend.rank)))

    told = cluster.run(run, 2)[0]
    assert "DDP: this rank averages gradients" in told
    assert "its batches ran out (see DDP.join)" in told


def test_a_rank_that_died_is_not_taken_for_one_without_batches():
    def run(backend: Backend) -> str:
        ddp = DDP(nn.Linear(6, 4), backend)
        if backend.rank == 1:
            backend.abort()
            return ""
        return str(outcome_of(lambda: backward(ddp, backend.rank)))

    told = Simulated().run(run, 2)[0]
    assert "rank 1" in told
    assert "batches ran out" not in told
