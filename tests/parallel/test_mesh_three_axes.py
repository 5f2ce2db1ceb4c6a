"""Data x stage x tensor: the three ways to split training, each over an axis of one mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_runs import rows_of
from tensor_models import (
    VOCABULARY,
    assert_all_close,
    batch,
    plan_for,
    trained_plainly,
    transformer,
)
from torch import Tensor, nn

from phalanx import (
    FSDP,
    Backend,
    DeviceMesh,
    Pipeline,
    PipelineParallelConfig,
    ReduceOp,
    all_reduce,
    all_reduce_coalesced_,
    parallelize,
    simulate,
)
from phalanx.tensor import full_state_dict, parallel_cross_entropy

STEPS = 3
LAYERS = ("embed", "blocks.0", "blocks.1", "norm", "head")


def layers() -> nn.Sequential:
    """The transformer as layers one after the other."""
    model = transformer(layers=2)
    return nn.Sequential(*(model.get_submodule(name) for name in LAYERS))


def plan(sequence_dim: int | None) -> dict[str, Any]:
    """The transformer's plan, for names that begin with the number of a layer."""
    numbers = {"embed": "0", "head": "4"}
    named = plan_for(sequence_dim=sequence_dim)
    found = {numbers.get(n, n.replace("blocks.*", "[12]")): style for n, style in named.items()}
    return found | ({"3": "sequence_norm"} if sequence_dim is not None else {})


def alone() -> tuple[list[float], dict[str, Tensor]]:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return trained_plainly(model, optimizer, steps=STEPS, rows=8)


def trained_on(
    mesh: DeviceMesh, pipeline: Pipeline, average: Callable[[], object] = lambda: None
) -> list[float]:
    """The mean losses of some steps; `average` is called after each backward pass."""
    data, tensor = mesh["data"], mesh["tensor"]
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01, eps=1e-3)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return parallel_cross_entropy(logits, tensor, targets, num_classes=VOCABULARY)

    losses = []
    for step in range(STEPS):
        inputs, targets = (rows_of(rows, data) for rows in batch(8, seed=step))
        optimizer.zero_grad()
        loss = pipeline.train_step(inputs, targets, loss_of)
        average()
        optimizer.step()
        losses.append(all_reduce(loss, data, ReduceOp.MEAN).item())
    return losses


def test_fsdp_may_be_what_splits_the_batch():
    losses, _ = alone()

    def run(backend: Backend) -> list[float]:
        mesh = DeviceMesh(backend, (2, 2, 2), ("data", "stage", "tensor"))
        model = parallelize(layers(), mesh["tensor"], plan(None))
        sharded = [FSDP(layer, mesh["data"]) for layer in model.children()]
        return trained_on(mesh, Pipeline(sharded, mesh["stage"], PipelineParallelConfig(2, 2)))

    for found in simulate(run, 8):
        assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.checkered
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_a_transformer_on_2_x_2_x_2_ranks_trains_as_the_plain_one(
    sequence_dim: int | None, schedule: str
):
    losses, state = alone()

    def run(backend: Backend) -> tuple[list[float], dict[str, Tensor], list[str]]:
        mesh = DeviceMesh(backend, (2, 2, 2), ("data", "stage", "tensor"))
        model = parallelize(layers(), mesh["tensor"], plan(sequence_dim))
        assert isinstance(model, nn.Sequential)
        pipeline = Pipeline(model, mesh["stage"], PipelineParallelConfig(2, 2, schedule))

        def average() -> None:
            gradients = [p.grad for p in pipeline.parameters()]
            all_reduce_coalesced_(gradients, mesh["data"], ReduceOp.MEAN)

        found = trained_on(mesh, pipeline, average)
        return found, full_state_dict(model), [name for name, _ in pipeline.named_parameters()]

    for found, whole, names in simulate(run, 8):
        assert found == pytest.approx(losses, rel=1e-5)
        assert_all_close({n: whole[n] for n in names}, {n: state[n] for n in names})
