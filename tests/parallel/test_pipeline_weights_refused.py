"""Pipelines with weights: what is refused, on every rank of every replica, before a pass begins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ddp_runs import outcome_of
from pipeline_runs import SIZE, piped
from replica_runs import (
    Wrap,
    assert_near,
    assert_parts,
    batch,
    model,
    replica_of,
    step,
    sum_of_losses,
    sums_of_gradients,
    tokens,
)
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DesyncError,
    DeviceMesh,
    LocalSGD,
    MisuseError,
    PeerLostError,
    SizeMismatchError,
    SyncBatchNorm,
    clip_grad_norm_,
    parallelize,
    simulate,
)

# What is refused ---------------------------------------------------------------------------------


def refusals(spoil: Callable[[DeviceMesh, dict[str, Any]], object]) -> list[BaseException | None]:
    """Each rank's error in a step whose arguments are spoiled; then all can go on."""
    expected = sums_of_gradients([(3, 2)])

    def run(backend: Backend) -> BaseException | None:
        pipeline, mesh = replica_of(backend, DDP, 2)
        inputs, targets = batch(mesh["data"].rank, (3, 2)[mesh["data"].rank], 0)
        given = {"inputs": inputs, "targets": targets, "weight": tokens(targets)}
        spoil(mesh, given)
        error = outcome_of(lambda: pipeline.train_step(loss=sum_of_losses, **given))
        step(pipeline, mesh, (3, 2), 0)
        assert_parts(pipeline, expected)
        return error

    return list(simulate(run, 4))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (math.nan, "weight must be a number of at least 0, not nan"),
        (-1, "weight must be a number of at least 0, not -1"),
        (math.inf, "weight must be a number of at least 0, not inf"),
        (torch.ones((), requires_grad=True), "weight has a gradient"),
    ],
)
def test_a_weight_that_is_none_is_refused_on_every_rank_of_every_replica(weight: Any, words: str):
    def spoil(mesh: DeviceMesh, given: dict[str, Any]) -> None:
        if mesh.backend.rank == 3:
            given["weight"] = weight

    errors = refusals(spoil)
    assert all(isinstance(error, ValueError) for error in errors)
    assert all(words in str(error) for error in errors[2:])
    assert all("rank 1 cannot begin it; see its error" in str(error) for error in errors[:2])


def test_all_weights_of_0_are_refused_on_every_rank():
    for error in refusals(lambda mesh, given: given.update(weight=0)):
        assert isinstance(error, ValueError)
        assert "all weights are 0" in str(error)

    def alone(backend: Backend) -> BaseException | None:
        pipeline = piped(backend, model(), 2)
        return outcome_of(lambda: pipeline.train_step(None, None, sum_of_losses, weight=0))

    assert all("all weights are 0" in str(error) for error in simulate(alone, 2))


def test_with_replicas_each_batch_has_a_weight():
    errors = refusals(lambda mesh, given: given.update(weight=None))
    assert all(isinstance(error, ValueError) for error in errors)
    assert all("with replicas=: weight must be a number" in str(error) for error in errors)


def test_two_weights_of_one_batch_are_refused_with_both_places():
    def spoil(mesh: DeviceMesh, given: dict[str, Any]) -> None:
        if mesh.backend.rank == 0:
            given["weight"] = 99

    errors = refusals(spoil)
    for error in errors[:2]:
        assert isinstance(error, DesyncError)
        assert re.search(r"weights of a batch differ, by rank: \{0: 99.0, 1: \d.0\}", str(error))
    assert all(isinstance(error, ValueError) for error in errors[2:])


def test_a_replica_of_which_a_rank_only_has_no_batch_is_refused():
    def spoil(mesh: DeviceMesh, given: dict[str, Any]) -> None:
        if mesh.backend.rank == 0:
            given["inputs"] = None

    errors = refusals(spoil)
    assert all(isinstance(error, MisuseError) for error in errors[:2])
    assert all("see its error" in str(error) for error in errors[2:])


def test_fewer_samples_than_micro_batches_are_as_many_micro_batches_but_with_fsdp():
    expected = sums_of_gradients([(1, 3)])

    def run(backend: Backend, wrap: Wrap) -> BaseException | None:
        pipeline, mesh = replica_of(backend, wrap, 2)
        error = outcome_of(lambda: step(pipeline, mesh, (1, 3), 0))
        if error is None:
            assert_parts(pipeline, expected)
        return error

    assert list(simulate(lambda backend: run(backend, DDP), 4)) == [None] * 4
    errors = list(simulate(lambda backend: run(backend, FSDP), 4))
    assert all(isinstance(error, SizeMismatchError) for error in errors[:2])
    assert all("see its error" in str(error) for error in errors[2:])


def test_a_weight_without_replicas_of_layers_that_average_is_refused():
    def run(backend: Backend) -> BaseException | None:
        mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
        pipeline = piped(mesh["stage"], [DDP(nn.Linear(SIZE, SIZE), mesh["data"]), nn.Tanh()], 2)
        inputs, targets = torch.ones(4, SIZE), torch.ones(4, SIZE)
        return outcome_of(lambda: pipeline.train_step(inputs, targets, F.mse_loss, weight=4))

    assert all("Pipeline(replicas=)" in str(error) for error in simulate(run, 4))


def test_layers_that_are_not_averaged_with_the_replicas_are_refused():
    def local(layer: nn.Module, data: Backend) -> nn.Module:
        return LocalSGD(layer, data, every=2)

    def run(backend: Backend, wrap: Wrap) -> BaseException | None:
        def build_and_train() -> None:
            pipeline, mesh = replica_of(backend, wrap, 2)
            step(pipeline, mesh, (3, 2), 0)

        return outcome_of(build_and_train)

    for error in simulate(lambda backend: run(backend, local), 4):
        assert isinstance(error, MisuseError)
        assert "is in LocalSGD, and not in DDP or FSDP over replicas=" in str(error)
    for error in simulate(lambda backend: run(backend, lambda layer, _: layer), 4):
        assert isinstance(error, (MisuseError, ValueError))
        assert "is trained outside of what averages" in str(error) or "see its error" in str(error)

    def alone(layer: nn.Module, data: Backend) -> nn.Module:
        return DDP(layer, data.subgroup([data.rank]))

    for error in simulate(lambda backend: run(backend, alone), 4):
        assert "is in DDP, and not in DDP or FSDP over replicas=" in str(error)


def test_replicas_on_some_ranks_of_a_pipeline_only_are_refused():
    def run(backend: Backend) -> BaseException | None:
        mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
        replicas = mesh["data"] if mesh["stage"].rank == 0 else None
        return outcome_of(lambda: piped(mesh["stage"], model(), 2, replicas=replicas))

    assert all("replicas (0, 2)" in str(error) for error in list(simulate(run, 4))[:2])


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_an_empty_replica_of_a_sync_batch_norm_is_refused_on_every_rank(wrap: Any):
    def run(backend: Backend) -> BaseException | None:
        mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
        norm = SyncBatchNorm(SIZE, mesh["data"]).double()
        layers = [*model()[:4], norm, *model()[4:]]
        wrapped = [wrap(x, mesh["data"]) if list(x.parameters()) else x for x in layers]
        pipeline = piped(mesh["stage"], wrapped, 2, replicas=mesh["data"])
        return outcome_of(lambda: step(pipeline, mesh, (0, 3), 0))

    errors = list(simulate(run, 4))
    assert all("weight 0 with a SyncBatchNorm" in str(error) for error in errors[:2])
    assert all("rank 0 cannot begin it; see its error" in str(error) for error in errors[2:])


def test_join_without_replicas_is_refused():
    def run(backend: Backend) -> BaseException | None:
        pipeline = piped(backend, model(), 2)
        return outcome_of(lambda: pipeline.join(lambda: None).__enter__())

    assert all("join() without replicas=" in str(error) for error in simulate(run, 2))


@pytest.mark.parametrize("cut", [("0", "2", "4", "6"), ("0", "2")])
def test_ranks_with_parts_of_the_same_layers_have_the_same_weight(cut: Sequence[str]):
    """Data x stage x tensor: each pipeline sees its own weights only. In all stages, or in one."""

    plain, (inputs, targets) = model()[:7], batch(0, 4, 0)
    loss = sum_of_losses(plain(inputs), targets) / tokens(targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)

    def run(backend: Backend, spoils: bool) -> BaseException | None:
        mesh = DeviceMesh(backend, (2, 2, 2), ("data", "stage", "tensor"))
        plan = dict(zip(cut, ["column", "row"] * 2, strict=False))
        layers = parallelize(model()[:7], mesh["tensor"], plan)
        wrapped = [DDP(x, mesh["data"]) if list(x.parameters()) else x for x in layers.children()]
        pipeline = piped(mesh["stage"], wrapped, 2, replicas=mesh["data"])
        odd = spoils and mesh["tensor"].rank == 1 and mesh["data"].rank == 0
        weight = tokens(targets) + odd

        def train() -> None:
            found = pipeline.train_step(inputs, targets, sum_of_losses, weight=weight)
            assert_near(found, loss)
            assert_near(clip_grad_norm_(pipeline, 1.0), norm)

        return outcome_of(train)

    assert list(simulate(lambda backend: run(backend, False), 8)) == [None] * 8
    errors = list(simulate(lambda backend: run(backend, True), 8))
    assert all(isinstance(error, DesyncError) for error in errors)
    assert all("STEP next, of weight" in str(error) for error in errors)


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_an_error_in_one_replica_is_told_to_all_also_to_those_without_a_batch(wrap: Any):
    def spoiled(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ZeroDivisionError

    def run(backend: Backend) -> BaseException | None:
        pipeline, mesh = replica_of(backend, wrap, 3)
        inputs, targets = batch(mesh["data"].rank, 3, 0)
        given = (inputs, targets) if mesh["data"].rank < 2 else (None, None)
        weight = tokens(targets) if mesh["data"].rank < 2 else 0
        loss = spoiled if mesh["data"].rank == 0 else sum_of_losses
        return outcome_of(lambda: pipeline.train_step(*given, loss, weight=weight))

    errors = list(simulate(run, 6))
    assert isinstance(errors[1], ZeroDivisionError)
    assert all(isinstance(error, PeerLostError) for n, error in enumerate(errors) if n != 1)
    assert all("failed: ZeroDivisionError" in str(error) for error in errors[2:])
