"""Pipelines and their replicas, with weights: the numbers of one process with the joined batch.

In double precision; the norm of a difference is at most 1e-12 of the reference's.
"""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from typing import Any

import forms
import pytest
import torch
from clusters import Cluster, Cooperative, Tcp
from ddp_runs import outcome_of
from pipeline_runs import SCHEDULES, SIZE, piped
from replica_runs import (
    IGNORED,
    STEPS,
    WRAPS,
    assert_near,
    assert_parts,
    batch,
    model,
    plainly,
    replica_of,
    sgd,
    step,
    sum_of_losses,
    sums_of_gradients,
    tokens,
)
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DesyncError,
    ErrorFeedback,
    GradScaler,
    TopK,
    clip_grad_norm_,
    simulate,
)
from phalanx.parallel.wrapper import slices_in

# The numbers of one process ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("DDP", schedule) for schedule in SCHEDULES),
        *(("FSDP", schedule) for schedule in forms.sizes(["1f1b", "zb_v"], SCHEDULES)),
        ("both", "1f1b"),
        ("SHARD_GRAD_OP", "zb_h1"),
        ("NO_SHARD", "interleaved_1f1b"),
    ],
)
def test_replicas_with_any_weights_train_as_one_process(name: str, schedule: str):
    """Gradients, losses, norms and parameters; with replicas that are empty in any step."""
    expected, state = plainly(STEPS)

    def run(backend: Backend) -> list[float]:
        pipeline, mesh = replica_of(backend, WRAPS[name], 3, schedule)
        optimizer, losses = sgd(pipeline.parameters()), []
        for seed, sizes in enumerate(STEPS):
            optimizer.zero_grad()
            loss = step(pipeline, mesh, sizes, seed).item()
            norm = clip_grad_norm_(pipeline, 0.1).item()
            assert (loss, norm) == pytest.approx(expected[seed][:2], rel=1e-12)
            assert_parts(pipeline, expected[seed][2])
            optimizer.step()
            losses.append(loss)
        assert_parts(pipeline, state, of="values")
        return losses

    first, *others = simulate(run, 6)
    assert all(losses == first for losses in others), "the same bits on every rank"


@pytest.mark.parametrize("where", [Cooperative(), Tcp()], ids=str)
@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_over_tcp_as_well(name: str, where: Cluster):
    expected, _ = plainly([(3, 2), (0, 4)])
    models = [model() for _ in range(4)]

    def run(backend: Backend) -> None:
        layers = models[backend.rank]
        pipeline, mesh = replica_of(backend, WRAPS[name], 2, layers=layers)
        optimizer = sgd(pipeline.parameters())
        for seed, sizes in enumerate([(3, 2), (0, 4)]):
            optimizer.zero_grad()
            assert step(pipeline, mesh, sizes, seed).item() == pytest.approx(
                expected[seed][0], rel=1e-12
            )
            clip_grad_norm_(pipeline, 0.1)
            assert_parts(pipeline, expected[seed][2])
            optimizer.step()

    where.run(run, 4)


@pytest.mark.parametrize("given_on", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_of_one_pipeline_count_by_what_is_in_them(schedule: str, given_on: int):
    """Without replicas; the weight is given on one rank only."""
    expected, _ = plainly([(7,)])
    inputs, targets = batch(0, 7, 0)

    def run(backend: Backend) -> float:
        pipeline = piped(backend, model(), 3, schedule)
        weight = tokens(targets) if backend.rank == given_on else None
        loss = pipeline.train_step(inputs, targets, sum_of_losses, weight=weight)
        assert loss.dtype == torch.float64
        clip_grad_norm_(pipeline, 0.1)
        assert_parts(pipeline, expected[0][2])
        return loss.item()

    assert simulate(run, 2) == pytest.approx([expected[0][0]] * 2, rel=1e-12)


def test_a_batch_of_which_nothing_counts_is_not_used():
    """Only the rank with the targets knows; NaN in the batch is nobody's."""
    expected, _ = plainly([(0, 3)])

    def run(backend: Backend) -> None:
        pipeline, mesh = replica_of(backend, DDP, 2)
        inputs, targets = batch(mesh["data"].rank, 3, 0)
        weight = tokens(targets)
        if mesh["data"].rank == 0:
            inputs, targets, weight = inputs * math.nan, targets.fill_(IGNORED), 0
        given = weight if mesh["stage"].rank == 1 else None
        pipeline.train_step(inputs, targets, sum_of_losses, weight=given)
        clip_grad_norm_(pipeline, 0.1)
        assert_parts(pipeline, expected[0][2])

    simulate(run, 4)


def test_gradients_of_several_steps_are_added_up():
    expected = [sums_of_gradients([(3, 2)]), sums_of_gradients([(3, 2), (0, 4)])]

    def run(backend: Backend) -> None:
        for wrap in (DDP, FSDP):
            pipeline, mesh = replica_of(backend, wrap, 2)
            for seed, sizes in enumerate([(3, 2), (0, 4)]):
                step(pipeline, mesh, sizes, seed)
                assert_parts(pipeline, expected[seed])

    simulate(run, 4)


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_averages_and_what_compressors_leave_over_are_the_gradients(wrap: Any):
    """Also of a replica that is empty later, which still sends what it has left over."""
    steps = [(3, 2), (0, 4), (5, 0)]
    expected = sums_of_gradients(steps)

    def run(backend: Backend) -> dict[str, Tensor]:
        def compressed(layer: nn.Module, data: Backend) -> nn.Module:
            return wrap(layer, data, compression=ErrorFeedback(TopK(0.1)))

        pipeline, mesh = replica_of(backend, compressed, 2)
        parts, total = slices_in(pipeline), {}
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.0)
        for seed, sizes in enumerate(steps):
            optimizer.zero_grad()
            step(pipeline, mesh, sizes, seed)
            for name, parameter in pipeline.named_parameters():
                assert parameter.grad is not None
                total[name] = total.get(name, 0) + parameter.grad.clone()
            optimizer.step()
        share = {"DDP": 2, "FSDP": 1}[wrap.__name__]  # replicas that have the same of an average
        sums = {}
        for name, parameter in pipeline.named_parameters():
            whole, part = torch.zeros(parts[parameter].shape, dtype=torch.float64), parts[parameter]
            whole.view(-1)[part.start : part.stop] = total[name].flatten() / share
            sums[name] = whole
        for key, left in pipeline.state_dict().items():
            if match := re.fullmatch(r"(\d+\.)compression@\d+/2\.residual\.(.*)", key):
                name = match.group(1) + match.group(2)
                sums[name] += left.view(sums[name].shape) / 2
        return sums

    together: dict[str, Tensor] = {}
    for sums in simulate(run, 4):
        for name, value in sums.items():
            together[name] = together.get(name, torch.zeros(())) + value
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(together[name], value, name)


@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_a_scaler_scales_sums_of_losses(name: str):
    """A step with an infinity in one replica is skipped on all ranks, the empty ones, too."""
    expected = sums_of_gradients([(0, 4)])

    def run(backend: Backend) -> None:
        pipeline, mesh = replica_of(backend, WRAPS[name], 2)
        optimizer, scaler = sgd(pipeline.parameters()), GradScaler(backend, init_scale=1024.0)

        def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
            return scaler.scale(sum_of_losses(outputs, targets))

        inputs, targets = batch(1, 4, 0)
        for factor in (1.0, math.inf):
            given = (inputs * factor, targets, scaled) if mesh["data"].rank else (None, None, None)
            before = [p.detach().clone() for p in pipeline.parameters()]
            optimizer.zero_grad()
            pipeline.train_step(*given, weight=tokens(targets) if mesh["data"].rank else 0)
            scaler.unscale_(optimizer)
            if factor == 1.0:
                assert_parts(pipeline, expected)
            scaler.step(optimizer)
            scaler.update()
            after = list(pipeline.parameters())
            moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert moved == (factor == 1.0 and any(p.numel() for p in after))
        assert scaler.get_scale() == 512.0

    simulate(run, 4)


class Counts(nn.Module):
    """Counts its forward passes, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * self.weight


def test_buffers_are_those_of_the_first_replica_with_a_batch():
    """Once at the beginning of a step, if they are broadcast."""

    def run(backend: Backend) -> list[float]:
        passes = []
        for broadcasts in (True, False):

            def wrap(layer: nn.Module, data: Backend, on: bool = broadcasts) -> nn.Module:
                return DDP(layer, data, broadcast_buffers=on)

            pipeline, mesh = replica_of(backend, wrap, 2, layers=[Counts(), Counts()])
            for seed, sizes in enumerate([(0, 4), (2, 2), (0, 4)]):
                step(pipeline, mesh, sizes, seed)
            passes += [value.item() for value in pipeline.buffers()]
        return passes

    # 0 and 2; 0 + 2 and 0 + 2, the first one's; 2, the second one's, and 2 + 2.
    assert list(simulate(run, 4)) == [[2, 2], [2, 2], [4, 6], [4, 6]]


# An uneven number of batches ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_an_uneven_epoch_under_join_is_that_of_one_process(name: str):
    """Replica r has r + 1 batches."""
    steps = [(3, 2, 4), (0, 2, 3), (0, 0, 5)]
    expected, state = plainly(steps)

    def run(backend: Backend) -> int:
        pipeline, mesh = replica_of(backend, WRAPS[name], 3)
        optimizer, replica, taken = sgd(pipeline.parameters()), mesh["data"].rank, []

        def follow() -> None:
            taken.append(clip_grad_norm_(pipeline, 0.1))
            optimizer.step()
            optimizer.zero_grad()

        with pipeline.join(follow):
            for seed in range(replica + 1):
                loss = step(pipeline, mesh, steps[seed], seed)
                assert loss.item() == pytest.approx(expected[seed][0], rel=1e-12)
                follow()
        assert_parts(pipeline, state, of="values")
        return len(taken)

    assert list(simulate(run, 6)) == [3] * 6


def test_a_rank_that_is_through_alone_is_named_on_all_ranks_of_its_pipeline():
    def run(backend: Backend) -> BaseException | None:
        pipeline, mesh = replica_of(backend, DDP, 2)
        through = backend.rank == 1

        def train() -> None:
            with nullcontext() if not through else pipeline.join(lambda: None):
                if not through:
                    step(pipeline, mesh, (3, 2), 0)

        return outcome_of(train)

    errors = list(simulate(run, 4))
    for error in errors[:2]:
        assert isinstance(error, DesyncError)
        assert "rank 0 began train_step while rank 1 began join" in str(error)
    for error in errors[2:]:
        assert isinstance(error, ValueError)
        assert "rank 0 cannot begin it; see its error" in str(error)
