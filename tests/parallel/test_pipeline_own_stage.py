"""A pipeline of which each rank wraps the layers of its own stage only, in DDP or FSDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_runs import outcome_of, rows_of
from forms import sizes
from pipeline_runs import SCHEDULES, SIZE, adam, batch, deep, piped
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DesyncError,
    DeviceMesh,
    DistributedError,
    MisuseError,
    Pipeline,
    ReduceOp,
    ShardingStrategy,
    UnsupportedOperationError,
    all_reduce,
    clip_grad_norm_,
    load_checkpoint,
    save_checkpoint,
    simulate,
)
from phalanx.pipeline import PipelineStage
from phalanx.tensor import full_state_dict, load_full_state_dict

AXES = ("data", "stage")
Wrap = Callable[[nn.Module, Backend], nn.Module]
FULL, GRADIENTS, NONE = (
    partial(FSDP, strategy=strategy)
    for strategy in (
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    )
)
HYBRID = partial(FSDP, strategy=ShardingStrategy.hybrid(2))


def grid(backend: Backend, stages: int = 2) -> DeviceMesh:
    return DeviceMesh(backend, (backend.world_size // stages, stages), AXES)


def own(stages: int, rank: int, schedule: str, layers: int = 12) -> set[int]:
    """The layers of a rank; two runs of them where the schedule has two chunks."""
    chunks = {"interleaved_1f1b": [rank, stages + rank], "zb_v": [rank, 2 * stages - 1 - rank]}
    runs = chunks.get(schedule, [rank])
    size = layers // stages // len(runs)
    return {run * size + n for run in runs for n in range(size)}


def each_its_own(mesh: DeviceMesh, wrap: Wrap, schedule: str = "1f1b", seed: int = 0) -> Pipeline:
    """Own layers with parameters are wrapped, all others are on the meta device."""
    mine = own(2, mesh["stage"].rank, schedule)
    layers = [
        layer.to("meta")
        if number not in mine
        else wrap(layer, mesh["data"])
        if list(layer.parameters())
        else layer
        for number, layer in enumerate(deep(seed=seed))
    ]
    return piped(mesh["stage"], layers, 2, schedule)


def plainly(steps: int) -> tuple[nn.Module, list[float], list[float]]:
    """The model, the losses and the norms of its gradients, on the joined batches."""
    model, losses, norms = deep(), [], []
    optimizer = adam(model.parameters())
    for seed in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(16, seed)
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return model, losses, norms


@pytest.mark.parametrize(
    ("wrap", "schedule"),
    [
        *((DDP, schedule) for schedule in SCHEDULES),
        *((FULL, schedule) for schedule in sizes(["1f1b", "interleaved_1f1b"], SCHEDULES)),
        (GRADIENTS, "1f1b"),
        (GRADIENTS, "zb_v"),
        (NONE, "interleaved_1f1b"),
        (NONE, "zb_h1"),
    ],
)
def test_it_trains_clips_saves_and_goes_on_as_the_plain_model(
    wrap: Wrap, schedule: str, tmp_path: Path
):
    """Saved by 2 x 2 ranks after two steps; loaded on as many with another seed, and on one."""
    model, losses, norms = plainly(3)
    expected = model.state_dict()

    def run(backend: Backend) -> dict[str, Tensor]:
        mesh = grid(backend)
        pipeline = each_its_own(mesh, wrap, schedule)
        optimizer = adam(pipeline.parameters())
        for seed in range(3):
            if seed == 2:
                together = {"backend": mesh[AXES]}
                save_checkpoint(tmp_path, model=pipeline, optimizer=optimizer, step=2, **together)
                pipeline = each_its_own(mesh, wrap, schedule, seed=5)
                optimizer = adam(pipeline.parameters())
                load_checkpoint(tmp_path, model=pipeline, optimizer=optimizer, **together)
            optimizer.zero_grad()
            rows = [rows_of(part, mesh["data"]) for part in batch(16, seed)]
            loss = pipeline.train_step(*rows, F.mse_loss)
            norm = clip_grad_norm_(pipeline, 0.05)
            optimizer.step()
            mean = all_reduce(loss, mesh["data"], ReduceOp.MEAN)
            assert mean.item() == pytest.approx(losses[seed], rel=1e-5)
            assert norm.item() == pytest.approx(norms[seed], rel=1e-5)
        return full_state_dict(pipeline)

    first, last, *replicas = simulate(run, 4)
    assert {**first, **last}.keys() == expected.keys()
    for found in (first, last, *replicas):
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key])

    def alone(backend: Backend) -> dict[str, Tensor]:
        model = deep(seed=7)
        load_checkpoint(tmp_path, model=model, backend=backend)
        return model.state_dict()

    for key, value in simulate(alone, 1)[0].items():
        torch.testing.assert_close(value, plainly(2)[0].state_dict()[key])


def losses_of(backend: Backend, build: Callable[[DeviceMesh], Pipeline]) -> list[float]:
    """Of three steps and of an evaluation."""
    mesh, found = grid(backend), []
    pipeline = build(mesh)
    optimizer = adam(pipeline.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        rows = [rows_of(part, mesh["data"]) for part in batch(16, seed)]
        found.append(pipeline.train_step(*rows, F.mse_loss))
        clip_grad_norm_(pipeline, 0.05)
        optimizer.step()
    found.append(pipeline.evaluate(*[rows_of(p, mesh["data"]) for p in batch(16, 3)], F.mse_loss))
    return all_reduce(torch.stack(found), mesh["data"], ReduceOp.MEAN).tolist()


def test_stages_may_be_wrapped_in_different_ways_or_not_be_trained():
    """FSDP on the first stage, DDP on the second; and one that is frozen, in nothing."""
    expected = plainly(3)[1]

    def mixed(mesh: DeviceMesh) -> Pipeline:
        return each_its_own(mesh, FULL if mesh["stage"].rank == 0 else DDP)

    for found in simulate(lambda b: losses_of(b, mixed), 4):
        assert found[:3] == pytest.approx(expected, rel=1e-5)

    def half_frozen(mesh: DeviceMesh) -> Pipeline:
        if mesh["stage"].rank == 1:
            return each_its_own(mesh, DDP)
        return each_its_own(mesh, lambda layer, _: layer.requires_grad_(False))

    frozen = [losses[0] for losses in simulate(lambda b: losses_of(b, half_frozen), 4)]
    assert frozen == pytest.approx(expected[:1] * 4, rel=1e-5)


def test_shards_may_have_replicas_of_their_own():
    """4 x 2 ranks: each stage in two copies, of two shards each."""
    model = plainly(0)[0]
    loss = F.mse_loss(model(batch(16)[0]), batch(16)[1])
    loss.backward()

    def run(backend: Backend) -> list[Tensor]:
        mesh = grid(backend)
        pipeline = each_its_own(mesh, HYBRID)
        pipeline.train_step(*[rows_of(part, mesh["data"]) for part in batch(16)], F.mse_loss)
        with torch.no_grad():
            for parameter in pipeline.parameters():
                parameter.copy_(parameter.grad)
        return full_state_dict(pipeline)

    for found in simulate(run, 8):
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, model.get_parameter(key).grad)


def test_a_part_of_a_layer_may_be_wrapped_and_the_plain_state_loads():
    """The layers are blocks, in which the linear layers are sharded; names stay the blocks'."""

    def blocks(seed: int) -> nn.Sequential:
        return nn.Sequential(deep(4, seed), deep(4, seed + 1))

    expected = blocks(3).state_dict()

    def run(backend: Backend) -> dict[str, Any]:
        mesh, layers = grid(backend), blocks(0)
        mine = layers[mesh["stage"].rank]
        mine[0], mine[2] = FSDP(mine[0], mesh["data"]), FSDP(mine[2], mesh["data"])
        pipeline = piped(mesh["stage"], layers)
        load_full_state_dict(pipeline, expected)
        state = full_state_dict(pipeline)
        assert list(state) == [name for name, _ in pipeline.named_parameters()]
        return state

    first, last, *_ = simulate(run, 4)
    for key, value in {**first, **last}.items():
        assert torch.equal(value, expected[key])
    assert {**first, **last}.keys() == expected.keys()


def test_fsdp_may_build_a_stage_that_is_on_the_meta_device_as_the_others_are():
    model = deep(4)
    loss = F.mse_loss(model(batch(16)[0]), batch(16)[1])

    def run(backend: Backend) -> float:
        mesh = grid(backend)
        with torch.device("meta"):
            layers = list(deep(4))
        for number in own(2, mesh["stage"].rank, "1f1b", layers=4):
            layers[number] = FSDP(layers[number], mesh["data"])
        pipeline = piped(mesh["stage"], layers)
        load_full_state_dict(pipeline, model.state_dict())
        mean = pipeline.train_step(*[rows_of(p, mesh["data"]) for p in batch(16)], F.mse_loss)
        return all_reduce(mean, mesh["data"], ReduceOp.MEAN).item()

    assert simulate(run, 4) == pytest.approx([loss.item()] * 4)


# What is refused ------------------------------------------------------------------------------


def refused(wrap_here: Callable[[DeviceMesh, list[nn.Module]], None]) -> list[Any]:
    """The errors of 2 x 2 ranks which build a pipeline of two layers, wrapped so."""

    def run(backend: Backend) -> BaseException | None:
        torch.manual_seed(0)
        mesh = grid(backend)
        layers: list[nn.Module] = [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
        wrap_here(mesh, layers)
        error = outcome_of(lambda: piped(mesh["stage"], layers))
        backend.barrier()
        return error

    return list(simulate(run, 4))


@pytest.mark.parametrize("wrap", [DDP, FSDP])
@pytest.mark.parametrize("which", [{0: 0}, {0: 1, 1: 1}, {0: 1, 1: 0}])
def test_a_rank_that_trains_layers_outside_while_others_wrap_is_named(
    wrap: Wrap, which: dict[int, int]
):
    """By the rank, which layer it wraps: rank 1 none; rank 0 that of rank 1; both the other's."""

    def run(backend: Backend) -> BaseException | None:
        mesh, layers = grid(backend), [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
        if mesh["stage"].rank in which:
            number = which[mesh["stage"].rank]
            layers[number] = wrap(layers[number], mesh["data"])
        pipeline = piped(mesh["stage"], layers)
        error = outcome_of(lambda: pipeline.train_step(*batch(8), F.mse_loss))
        assert pipeline.evaluate(*batch(8), F.mse_loss) > 0, "the group is whole"
        return error

    outside = [stage for stage in (0, 1) if which.get(stage) != stage]
    for rank, error in enumerate(simulate(run, 4)):
        assert isinstance(error, MisuseError)
        assert error.rank == rank % 2
        mine = rank % 2 in outside
        said = f"{rank % 2}.weight" if mine else f"rank {outside[0]}: {outside[0]}.weight"
        assert f"train_step: {said} is trained outside" in str(error)
        assert "Let each rank wrap all layers of its own that it trains" in str(error)


def test_a_stage_that_is_frozen_at_first_is_refused_when_it_is_trained():
    def run(backend: Backend) -> tuple[BaseException | None, ...]:
        mesh, layers = grid(backend), list(deep(4))
        for layer in layers[:2]:
            layer.requires_grad_(False)
        if mesh["stage"].rank == 1:
            layers[2] = DDP(layers[2], mesh["data"])
        pipeline = piped(mesh["stage"], layers)

        def step() -> None:
            pipeline.train_step(*batch(8), F.mse_loss)

        before = outcome_of(step)
        pipeline.requires_grad_(True)
        return before, outcome_of(step)

    for before, after in simulate(run, 4):
        assert before is None
        assert isinstance(after, MisuseError)
        assert "0.weight is trained outside" in str(after)


@pytest.mark.parametrize("wrap", [DDP, FSDP])
@pytest.mark.parametrize("axis", [*AXES, None])
def test_a_wrapper_over_the_ranks_of_other_stages_is_refused(wrap: Wrap, axis: str | None):
    """It would average the gradients of layers which only have the same shapes."""

    def wrap_own(mesh: DeviceMesh, layers: list[nn.Module]) -> None:
        number = mesh["stage"].rank
        layers[number] = wrap(layers[number], mesh[axis] if axis else mesh.backend)

    for rank, error in enumerate(refused(wrap_own)):
        if axis == "data":
            assert error is None
            continue
        assert isinstance(error, MisuseError)
        assert error.rank == rank % 2
        assert f"is in {wrap.__name__} over ranks that train other layers" in str(error)
        assert 'such as mesh["data"]' in str(error)


def test_a_stage_that_would_leave_out_a_micro_batch_is_refused():
    """The other stages would go on with all of them."""

    def wrap_own(mesh: DeviceMesh, layers: list[nn.Module]) -> None:
        number = mesh["stage"].rank
        layers[number] = DDP(layers[number], mesh["data"], skip_nonfinite=number == 1)

    for error in refused(wrap_own):
        assert isinstance(error, MisuseError)
        assert "rank 1: Pipeline: layer 1 is in DDP with skip_nonfinite" in str(error)
        assert "let phalanx.GradScaler skip the whole step" in str(error)


def test_a_replica_that_wraps_fewer_layers_than_the_other_trains_nothing():
    """Its own pipeline refuses them; the other's ranks hear that it has left."""

    def run(backend: Backend) -> BaseException | None:
        mesh, layers = grid(backend), [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
        stage, replica = mesh["stage"].rank, mesh["data"].rank

        def build() -> None:
            if (stage, replica) != (1, 1):
                layers[stage] = DDP(layers[stage], mesh["data"])
            piped(mesh["stage"], layers).train_step(*batch(8), F.mse_loss)

        return outcome_of(build)

    errors = simulate(run, 4)
    assert all(isinstance(error, DistributedError) for error in errors)
    assert all("1.weight is trained outside" in str(error) for error in errors[2:])


def test_other_layers_and_other_shapes_are_named_as_the_plain_model_has_them():
    def wrap_own(mesh: DeviceMesh, layers: list[nn.Module]) -> None:
        number = mesh["stage"].rank
        if number == 1:
            layers[0] = nn.Linear(SIZE, SIZE + 1)
        layers[number] = FSDP(layers[number], mesh["data"])

    for error in refused(wrap_own):
        assert isinstance(error, DesyncError)
        assert "rank 1 has layer 0: Linear(weight float32 [7, 6], bias float32 [7])" in str(error)
        assert "rank 0 has layer 0: Linear(weight float32 [6, 6], bias float32 [6])" in str(error)


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_a_parameter_of_two_stages_is_found_where_one_of_them_is_wrapped(wrap: Wrap):
    def tie_and_wrap_own(mesh: DeviceMesh, layers: list[nn.Module]) -> None:
        layers[1].weight = layers[0].weight
        number = mesh["stage"].rank
        layers[number] = wrap(layers[number], mesh["data"])

    for error in refused(tie_and_wrap_own):
        assert isinstance(error, UnsupportedOperationError)
        assert "0.weight on rank 0 and 1.weight on rank 1 are one parameter" in str(error)


def test_stages_of_ones_own_are_wrapped_where_they_are():
    """A cut by hand: one layer on the first rank, three on the second."""
    stages = [PipelineStage(0, 1, 0), PipelineStage(1, 4, 1)]
    model = deep(4)
    loss = F.mse_loss(model(batch(16)[0]), batch(16)[1])

    def run(backend: Backend) -> float:
        mesh, layers = grid(backend), list(deep(4))
        start, end, _ = stages[mesh["stage"].rank]
        layers[start:end] = [DDP(layer, mesh["data"]) for layer in layers[start:end]]
        pipeline = piped(mesh["stage"], layers, stages=stages)
        rows = [rows_of(part, mesh["data"]) for part in batch(16)]
        mean = pipeline.train_step(*rows, F.mse_loss)
        return all_reduce(mean, mesh["data"], ReduceOp.MEAN).item()

    assert simulate(run, 4) == pytest.approx([loss.item()] * 4)
