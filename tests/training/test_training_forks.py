"""A child that a rank forks in the middle of its training: it has copies of all that trains.

What leads to the other ranks raises; leaving a `with` says nothing; the rank's own training goes on
as if there were no child.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from children import left, refused, said_by_child
from clusters import CLUSTERS, Cluster, Tcp
from torch import nn

import phalanx
from phalanx import Backend, ParameterServer

SHARED_OR_NOT = [each for each in CLUSTERS if each.name in ("tcp", "shm")]
ranks = pytest.mark.parametrize("ranks", SHARED_OR_NOT, ids=str)


def test_a_child_of_a_worker_leaves_the_parameter_server_to_it() -> None:
    def run(backend: Backend) -> str:
        param = torch.zeros(3)
        if backend.rank == 0:
            record = ParameterServer.serve([param], backend, torch.optim.SGD)
            return f"{record.params[0].sum() * 1000:.1f}"
        with ParameterServer.connect([param], backend) as client:
            client.push([torch.ones(3)])
            said = said_by_child(lambda: refused(lambda: client.push([torch.ones(3)])))
            said += said_by_child(lambda: left(client))
            client.push([torch.ones(3)])
        return said

    assert Tcp().run(run, 2) == ["-6.0", ""]


def test_a_child_does_not_take_a_save_for_done_that_its_parent_is_writing(tmp_path: Path) -> None:
    def run(backend: Backend) -> str:
        model = phalanx.DDP(nn.Linear(2, 2), backend)
        pending = phalanx.save_checkpoint(
            tmp_path, model=model, step=1, backend=backend, async_save=True
        )
        said = said_by_child(lambda: refused(pending.wait))
        pending.wait()
        return said

    assert Tcp().run(run, 1) == [""]


@ranks
def test_a_child_that_trains_disturbs_no_gradient_of_its_parent(ranks: Cluster) -> None:
    def run(backend: Backend) -> str:
        torch.manual_seed(0)
        model = phalanx.DDP(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1)), backend)
        inputs = torch.full((4, 300), backend.rank + 1.0)
        model(inputs).sum().backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        said = said_by_child(lambda: refused((100 * model(inputs)).sum().backward))
        backend.barrier()
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, before, after))
        return said

    assert ranks.run(run, 2) == ["", ""]


@ranks
def test_a_child_cannot_run_a_sharded_model_and_the_parent_can(ranks: Cluster) -> None:
    def run(backend: Backend) -> str:
        torch.manual_seed(0)
        model = phalanx.FSDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.full((4, 64), backend.rank + 1.0)
        losses = []
        for _ in range(2):
            loss = model(inputs).sum()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            said = said_by_child(lambda: refused(lambda: model(inputs)))
        assert losses[1] < losses[0]
        return said

    assert ranks.run(run, 2) == ["", ""]
