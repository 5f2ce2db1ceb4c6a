"""Data x tensor: DDP or FSDP over one axis of a mesh, tensor parallelism over the other."""

from __future__ import annotations

import copy

import pytest
import torch
from clusters import Cluster
from ddp_runs import rows_of
from tensor_models import (
    VOCABULARY,
    assert_all_close,
    batch,
    plain_loss,
    plan_for,
    trained_plainly,
    transformer,
)
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    ShardingStrategy,
    clip_grad_norm_,
    parallelize,
    simulate,
)
from phalanx.tensor import (
    full_state_dict,
    load_full_state_dict,
    parallel_cross_entropy,
)

STEPS = 3
Outcome = tuple[list[float], dict[str, Tensor]]


def alone() -> Outcome:
    model = transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return trained_plainly(model, optimizer, steps=STEPS, rows=4)


def on_a_mesh(
    backend: Backend, model: torch.nn.Module, shape: tuple[int, int], sequence_dim: int | None
) -> Outcome:
    mesh = DeviceMesh(backend, shape, ("data", "tensor"))
    data, tensor = mesh["data"], mesh["tensor"]
    model = DDP(parallelize(model, tensor, plan_for(sequence_dim=sequence_dim)), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = (rows_of(rows, data) for rows in batch(4, seed=step))
        loss = parallel_cross_entropy(model(inputs), tensor, targets, num_classes=VOCABULARY)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, full_state_dict(model)


def assert_trained_as_alone(ranks: list[Outcome]) -> None:
    """The mean of the ranks' losses is the joined batch's, and all have the plain model's state."""
    losses, state = alone()
    means = [sum(step) / len(ranks) for step in zip(*(found for found, _ in ranks), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for _, found in ranks:
        assert_all_close(found, state)


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
def test_training_equals_the_plain_model_on_the_joined_batch(
    shape: tuple[int, int], sequence_dim: int | None
):
    world_size = shape[0] * shape[1]
    results = simulate(lambda b: on_a_mesh(b, transformer(), shape, sequence_dim), world_size)
    assert_trained_as_alone(list(results))


@pytest.mark.checkered
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=str
)
def test_fsdp_over_the_data_axis_trains_clips_saves_and_loads_as_the_plain_model(
    strategy: ShardingStrategy, tied: bool
):
    plain = transformer(tied=tied)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    norms = []
    for step in range(STEPS):
        inputs, targets = batch(4, seed=step)
        optimizer.zero_grad()
        plain_loss(plain(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        optimizer.step()

    def run(backend: Backend) -> tuple[list[float], dict[str, Tensor]]:
        mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
        data, tensor = mesh["data"], mesh["tensor"]
        model = parallelize(transformer(tied=tied), tensor, plan_for(sequence_dim=1))
        model = FSDP(model, data, strategy=strategy)
        load_full_state_dict(model, transformer(tied=tied).state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        found = []
        for step in range(STEPS):
            inputs, targets = (rows_of(rows, data) for rows in batch(4, seed=step))
            loss = parallel_cross_entropy(model(inputs), tensor, targets, num_classes=VOCABULARY)
            optimizer.zero_grad()
            loss.backward()
            found.append(clip_grad_norm_(model, 0.5).item())
            optimizer.step()
        return found, full_state_dict(model)

    for found, state in simulate(run, 4):
        assert found == pytest.approx(norms, rel=1e-5)
        assert_all_close(state, plain.state_dict())


@pytest.mark.checkered
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_training_equals_the_plain_model_on_every_backend(
    cluster: Cluster, sequence_dim: int | None
):
    """Layers, loss and the whole state, of the mesh's groups."""
    built = transformer()  # here, since these ranks share one random state
    run = lambda b: on_a_mesh(b, copy.deepcopy(built), (2, 2), sequence_dim)  # noqa: E731
    assert_trained_as_alone(cluster.run(run, 4))
