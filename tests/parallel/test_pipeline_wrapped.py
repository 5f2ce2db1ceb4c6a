"""A pipeline with what else there is: its layers in DDP or FSDP, clipped, scaled, saved, loaded."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ddp_runs import outcome_of, rows_of
from pipeline_runs import adam, batch, deep, piped, sgd
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    ErrorFeedback,
    GradScaler,
    MisuseError,
    PeerLostError,
    Pipeline,
    ReduceOp,
    TopK,
    all_reduce_coalesced_,
    clip_grad_norm_,
    load_checkpoint,
    parallelize,
    save_checkpoint,
    simulate,
)
from phalanx.tensor import full_state_dict, load_full_state_dict

AXES = ("data", "stage")
Wrap = Callable[[nn.Module, Backend], nn.Module]
WRAPS: dict[str, Wrap] = {
    "DDP": DDP,
    "FSDP": FSDP,
    "by hand": lambda layer, _: layer,
}


def grid(backend: Backend) -> DeviceMesh:
    return DeviceMesh(backend, (2, 2), AXES)


def wrapped(mesh: DeviceMesh, wrap: Wrap, schedule: str = "1f1b", seed: int = 0) -> Pipeline:
    """Each layer that has parameters, in DDP or FSDP over the data axis."""
    layers = [
        wrap(layer, mesh["data"]) if list(layer.parameters()) else layer
        for layer in deep(seed=seed)
    ]
    return piped(mesh["stage"], layers, 2, schedule)


def step(pipeline: Pipeline, mesh: DeviceMesh, seed: int, *, by_hand: bool) -> None:
    """Gradients of the mean over both halves of a batch."""
    rows = [rows_of(part, mesh["data"]) for part in batch(8, seed)]
    pipeline.zero_grad()
    pipeline.train_step(*rows, F.mse_loss)
    if by_hand:
        mine = [p.grad for p in pipeline.parameters() if p.grad is not None]
        all_reduce_coalesced_(mine, mesh["data"], ReduceOp.MEAN)


def plainly(steps: int, max_norm: float) -> tuple[nn.Module, list[float]]:
    model, norms = deep(), []
    optimizer = adam(model.parameters())
    for seed in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(8, seed)
        F.mse_loss(model(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return model, norms


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("DDP", "interleaved_1f1b"),
        ("DDP", "zb_v"),
        ("FSDP", "1f1b"),
        ("FSDP", "zb_h1"),
        ("by hand", "zb_h1"),
    ],
)
def test_data_and_stages_train_clip_save_and_go_on_as_the_plain_model(
    name: str, schedule: str, tmp_path: Path
):
    """Saved by 2 x 2 ranks after two steps; loaded on as many with another seed, and on one."""
    plain, norms = plainly(3, max_norm=0.05)
    expected = plain.state_dict()

    def run(backend: Backend) -> dict[str, Tensor]:
        mesh, by_hand = grid(backend), name == "by hand"
        pipeline = wrapped(mesh, WRAPS[name], schedule)
        optimizer = adam(pipeline.parameters())
        for seed in range(3):
            if seed == 2:
                together = {"backend": mesh[AXES]}
                save_checkpoint(tmp_path, model=pipeline, optimizer=optimizer, step=2, **together)
                pipeline = wrapped(mesh, WRAPS[name], schedule, seed=5)
                optimizer = adam(pipeline.parameters())
                load_checkpoint(tmp_path, model=pipeline, optimizer=optimizer, **together)
            step(pipeline, mesh, seed, by_hand=by_hand)
            norm = clip_grad_norm_(pipeline, 0.05)
            assert norm.item() == pytest.approx(norms[seed], rel=1e-5)
            optimizer.step()
        return full_state_dict(pipeline)

    for found in simulate(run, 4):
        assert found.keys() < expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key])

    def alone(backend: Backend) -> dict[str, Tensor]:
        model = deep(seed=7)
        load_checkpoint(tmp_path, model=model, backend=backend)
        return model.state_dict()

    for key, value in simulate(alone, 1)[0].items():
        torch.testing.assert_close(value, plainly(2, max_norm=0.05)[0].state_dict()[key])


@pytest.mark.parametrize(("name", "schedule"), [("DDP", "1f1b"), ("FSDP", "zb_h1")])
def test_what_compressors_leave_over_is_saved_layer_by_layer(
    name: str, schedule: str, tmp_path: Path
):
    """Layers of different stages have parameters of one name. Training goes on bit for bit."""

    def compressed(layer: nn.Module, data: Backend) -> nn.Module:
        kind = DDP if name == "DDP" else FSDP
        return kind(layer, data, compression=ErrorFeedback(TopK(0.1)))

    def train(pipeline: Pipeline, mesh: DeviceMesh, steps: range) -> dict[str, Tensor]:
        for seed in steps:
            step(pipeline, mesh, seed, by_hand=False)
            sgd(pipeline.parameters()).step()
        state: dict[str, Tensor] = pipeline.state_dict()
        return {key: value.clone() for key, value in state.items()}

    def run(backend: Backend) -> None:
        mesh = grid(backend)
        pipeline = wrapped(mesh, compressed, schedule)
        saved = train(pipeline, mesh, range(2))
        save_checkpoint(tmp_path, model=pipeline, step=2, backend=mesh[AXES])
        other = wrapped(mesh, compressed, schedule, seed=5)
        load_checkpoint(tmp_path, model=other, backend=mesh[AXES])
        assert any("compression@" in key for key in saved)
        for went_on in (saved, train(pipeline, mesh, range(2, 4))):
            found: dict[str, Tensor] = other.state_dict()
            assert found.keys() == went_on.keys()
            assert all(torch.equal(found[key], value) for key, value in went_on.items())
            train(other, mesh, range(2, 4))

    simulate(run, 4)


@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_a_step_that_a_scaler_skips_leaves_all_compressors_as_they_were(name: str):
    """An infinity in one layer of one stage: the averages of other layers are finite."""

    def compressed(layer: nn.Module, data: Backend) -> nn.Module:
        kind = DDP if name == "DDP" else FSDP
        return kind(layer, data, compression=ErrorFeedback(TopK(0.1)))

    def run(backend: Backend) -> None:
        mesh = grid(backend)
        pipeline = wrapped(mesh, compressed)
        optimizer, scaler = sgd(pipeline.parameters()), GradScaler(backend, init_scale=2.0)
        states: list[dict[str, Tensor]] = []
        for seed in range(4):
            rows = [rows_of(part, mesh["data"]) for part in batch(8, seed)]
            optimizer.zero_grad()
            last = list(pipeline.parameters())[-1]
            spoils = seed == 2 and backend.rank == 3
            handle = last.register_hook(lambda g, by=math.inf if spoils else 1.0: g * by)
            pipeline.train_step(*rows, lambda out, y: scaler.scale(F.mse_loss(out, y)))
            handle.remove()
            pipeline.state_dict()  # a look at the state is no step
            scaler.step(optimizer)
            scaler.update()
            states.append({k: v.clone() for k, v in pipeline.state_dict().items()})
        assert scaler.get_scale() == 1.0
        for key, value in states[1].items():
            assert torch.equal(states[2][key], value), key
        assert any("compression@" in k and not v.equal(states[1][k]) for k, v in states[3].items())

    simulate(run, 4)


def test_what_compressors_leave_over_goes_to_other_stages_and_ranks(tmp_path: Path):
    """Saved by 2 stages of 2 replicas, loaded by 3 stages: averages lack as much."""

    def built(stage: Backend, data: Backend | None, seed: int) -> Pipeline:
        alone = stage.subgroup([stage.rank]) if data is None else data

        def wrap(layer: nn.Module) -> nn.Module:
            return DDP(layer, alone, compression=ErrorFeedback(TopK(0.1)))

        layers = [wrap(layer) if list(layer.parameters()) else layer for layer in deep(seed=seed)]
        return piped(stage, layers, 2)

    def lacks(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Of each parameter, the sum of what ranks have left over, each by its share."""
        total: dict[str, Tensor] = {}
        for key, value in (item for state in states for item in state.items()):
            if match := re.fullmatch(r"(\d+\.)compression@\d+/(\d+)\.residual\.(.*)", key):
                layer, ranks, name = match.groups()
                total[layer + name] = total.get(layer + name, 0) + value.double() / int(ranks)
        return total

    def save(backend: Backend) -> dict[str, Tensor]:
        mesh = grid(backend)
        pipeline = built(mesh["stage"], mesh["data"], seed=0)
        step(pipeline, mesh, 0, by_hand=False)
        save_checkpoint(tmp_path, model=pipeline, step=1, backend=mesh[AXES])
        return {key: value.clone() for key, value in pipeline.state_dict().items()}

    def load(backend: Backend) -> dict[str, Tensor]:
        pipeline = built(backend, None, seed=5)
        load_checkpoint(tmp_path, model=pipeline, backend=backend)
        return dict(pipeline.state_dict())

    before, after = lacks(list(simulate(save, 4))), lacks(list(simulate(load, 3)))
    assert len(before) == 12
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=2**-23, atol=0)


def test_a_pipeline_is_saved_and_goes_on_with_other_stages(tmp_path: Path):
    """Saved on two ranks, loaded on three in another schedule, with the optimizer's state."""

    def save(backend: Backend) -> None:
        pipeline = piped(backend, deep())
        optimizer = adam(pipeline.parameters())
        for seed in range(2):
            optimizer.zero_grad()
            pipeline.train_step(*batch(8, seed), F.mse_loss)
            clip_grad_norm_(pipeline, 0.05)
            optimizer.step()
        save_checkpoint(tmp_path, model=pipeline, optimizer=optimizer, step=2)

    def go_on(backend: Backend) -> dict[str, Tensor]:
        pipeline = piped(backend, deep(seed=3), 2, "interleaved_1f1b")
        optimizer = adam(pipeline.parameters())
        assert load_checkpoint(tmp_path, model=pipeline, optimizer=optimizer).step == 2
        optimizer.zero_grad()
        pipeline.train_step(*batch(8, 2), F.mse_loss)
        clip_grad_norm_(pipeline, 0.05)
        optimizer.step()
        return pipeline.state_dict()

    simulate(save, 2)
    expected = plainly(3, max_norm=0.05)[0].state_dict()
    for found in simulate(go_on, 3):
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key])


# Clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
def test_gradients_are_clipped_by_the_norm_over_all_stages(norm_type: float):
    plain = deep()
    F.mse_loss(plain(batch(8)[0]), batch(8)[1]).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)

    def run(backend: Backend) -> Tensor:
        pipeline = piped(backend, deep())
        pipeline.train_step(*batch(8), F.mse_loss)
        norm = clip_grad_norm_(pipeline, 0.05, norm_type=norm_type)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        return norm

    norms = list(simulate(run, 3))
    assert len({norm.item() for norm in norms}) == 1
    torch.testing.assert_close(norms[0].float(), expected)


def test_what_is_beside_a_pipeline_counts_once_and_a_stage_may_have_no_parameters():
    def run(backend: Backend) -> float:
        pipeline = piped(backend, [nn.Linear(1, 1, bias=False), nn.Tanh()], 2)
        beside = nn.Linear(1, 1, bias=False)
        both = nn.ModuleList([beside, pipeline])
        for parameter, value in zip(both.parameters(), (3.0, 4.0), strict=False):
            parameter.grad = torch.tensor([[value]])
        return clip_grad_norm_(both, 1.0).item()

    assert simulate(run, 2) == pytest.approx([5.0, 5.0])


# State of layers that are cut, in wrappers of their own ---------------------------------------


@pytest.mark.parametrize("piped_too", [False, True])
@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_the_whole_state_is_found_in_wrappers_inside_of_a_model(wrap: Wrap, piped_too: bool):
    def build(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))

    def run(backend: Backend) -> None:
        mesh = DeviceMesh(backend, (2, backend.world_size // 4, 2), ("data", "stage", "tensor"))
        model = parallelize(build(0), mesh["tensor"], {"0": "column", "2": "row"})
        assert isinstance(model, nn.Sequential)
        first, middle, last = model
        model = nn.Sequential(wrap(first, mesh["data"]), middle, wrap(last, mesh["data"]))
        if piped_too:
            model = piped(mesh["stage"], model, 2)
        for seed in (0, 1):
            if seed:
                load_full_state_dict(model, build(seed).state_dict())
            found, expected = full_state_dict(model), build(seed).state_dict()
            assert found.keys() == (found.keys() if piped_too else expected.keys())
            for key, value in found.items():
                assert torch.equal(value, expected[key]), key

    simulate(run, 8 if piped_too else 4)


# Loss scaling ---------------------------------------------------------------------------------


class Overflows(nn.Module):
    """Gradients that are infinite here, if told so, and end here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.now = nn.Parameter(torch.ones(6)), False

    def forward(self, x: Tensor) -> Tensor:
        if self.now:
            self.weight.register_hook(lambda gradient: gradient * math.inf)
        return x * self.weight


@pytest.mark.parametrize("frozen", [False, True])
def test_an_infinity_in_one_stage_lets_all_skip_the_step(frozen: bool):
    """Also a stage of which nothing is trained."""

    def run(backend: Backend) -> list[bool]:
        overflows = Overflows()
        last = nn.Linear(6, 6).requires_grad_(not frozen)
        pipeline = piped(backend, [nn.Linear(6, 6), overflows, last])
        scaler = GradScaler(backend, init_scale=1024.0)
        optimizer = sgd(pipeline.parameters())
        moved = []
        for now in (False, True):
            overflows.now = now
            before = copy.deepcopy(pipeline.state_dict())
            optimizer.zero_grad()
            loss = pipeline.train_step(*batch(8), lambda y, t: scaler.scale(F.mse_loss(y, t)))
            scaler.unscale_(optimizer)
            clip_grad_norm_(pipeline, 1.0)
            scaler.step(optimizer)
            assert 0 < loss.item() / scaler.get_scale() < 10
            scaler.update()
            moved.append(
                any(not torch.equal(v, before[k]) for k, v in pipeline.state_dict().items())
            )
        assert scaler.get_scale() == 512.0
        return moved

    assert simulate(run, 3) == [[True, False], [True, False], [not frozen, False]]


# Around a pipeline, and copies of it ----------------------------------------------------------


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_what_averages_goes_around_the_layers_and_not_around_the_pipeline(wrap: Wrap):
    def run(backend: Backend) -> BaseException | None:
        mesh = grid(backend)
        pipeline = piped(mesh["stage"], deep(), 2)
        return outcome_of(lambda: wrap(pipeline, mesh["data"]))

    for error in simulate(run, 4):
        assert isinstance(error, MisuseError)
        assert "the module is a Pipeline, which is not called" in str(error)
        assert "around its layers, before they are given to it" in str(error)


def test_a_copy_of_a_pipeline_is_one_of_its_own_on_the_same_ranks():
    """As for an average of the weights, with which one evaluates."""

    def run(backend: Backend) -> list[float]:
        pipeline = piped(backend, deep())
        pipeline.train_step(*batch(8), F.mse_loss)
        other = copy.deepcopy(pipeline)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        losses = [each.train_step(*batch(8), F.mse_loss).item() for each in (pipeline, other)]
        assert other.backend is backend
        assert not any(a is b for a, b in zip(pipeline.parameters(), other.parameters()))  # noqa: B905
        return losses

    inputs, targets = batch(8)
    expected = [F.mse_loss(deep()(inputs), targets).item(), targets.square().mean().item()]
    for losses in simulate(run, 2):
        assert losses == pytest.approx(expected)


class Spoils(nn.Module):
    """An error in the backward pass of one rank."""

    def __init__(self, spoils: bool) -> None:
        super().__init__()
        self.spoils = spoils

    def forward(self, x: Tensor) -> Tensor:
        if self.spoils:
            x = x * 1.0
            x.register_hook(lambda _: 1 / 0)
        return x


@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_an_error_on_one_rank_is_told_to_replicas_and_parameters_can_be_read(name: str):
    """Rank 2 fails; rank 0 has the same layers, and waits for it where they are averaged."""

    def run(backend: Backend) -> tuple[BaseException | None, bool]:
        mesh = grid(backend)
        layers = [
            WRAPS[name](layer, mesh["data"]) if list(layer.parameters()) else layer
            for layer in deep()
        ]
        layers.insert(1, Spoils(backend.rank == 2))
        pipeline = piped(mesh["stage"], layers, 2)
        before = [p.detach().clone() for p in pipeline.parameters()]
        rows = [rows_of(part, mesh["data"]) for part in batch(8)]
        error = outcome_of(lambda: pipeline.train_step(*rows, F.mse_loss))
        after = list(pipeline.parameters())
        return error, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    errors, same = zip(*simulate(run, 4), strict=True)
    assert isinstance(errors[0], PeerLostError)
    assert isinstance(errors[2], ZeroDivisionError)
    assert all(same)
