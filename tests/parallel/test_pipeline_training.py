"""A pipeline trains as the plain model does: losses, gradients, parameters after several steps."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_models import noise, seeded
from pipeline_runs import (
    SCHEDULES,
    SIZE,
    adam,
    assert_same_training,
    batch,
    deep,
    piped,
    sgd,
    train_piped,
    train_plainly,
)
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import Backend, SimulatedBackend, balance_stages, simulate


@pytest.mark.checkered
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6])
def test_training_on_any_number_of_stages_equals_plain_training(stages: int, schedule: str) -> None:
    """Batches of several sizes: some are divisible by the number of micro-batches, some are not."""
    batches = [batch(rows, seed) for seed, rows in enumerate([8, 13, 8])]

    def run(backend: Backend) -> Any:
        return train_piped(piped(backend, deep(), 4, schedule), sgd, batches)

    assert_same_training(simulate(run, stages), train_plainly(deep(), sgd, batches))


def test_training_equals_plain_training_on_every_kind_of_backend(cluster: Cluster) -> None:
    batches = [batch(rows, seed) for seed, rows in enumerate([6, 7])]
    model = deep()

    def run(backend: Backend) -> list[Any]:
        pipelines = [piped(backend, deepcopy(model), 3, schedule) for schedule in SCHEDULES]
        return [train_piped(pipeline, adam, batches) for pipeline in pipelines]

    expected = train_plainly(deep(), adam, batches)
    for per_rank in zip(*cluster.run(run, 3), strict=True):
        assert_same_training(list(per_rank), expected)


@pytest.mark.checkered
@pytest.mark.parametrize("micro_batches", [1, 3, 11])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_micro_batches_gives_the_same(micro_batches: int, schedule: str) -> None:
    def run(backend: Backend) -> Any:
        return train_piped(piped(backend, deep(), micro_batches, schedule), adam, [batch(11)] * 2)

    assert_same_training(simulate(run, 3), train_plainly(deep(), adam, [batch(11)] * 2))


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_backward_passes_in_two_parts_give_the_bits_of_1f1b(schedule: str) -> None:
    """On any ranks: which stage a layer is on makes no difference to its gradient, either."""

    def run(backend: Backend, name: str) -> dict[str, Tensor]:
        pipeline = piped(backend, deep(), 5, name)
        for seed in range(2):
            pipeline.train_step(*batch(11, seed), F.mse_loss)
        return {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}

    def together(name: str) -> dict[str, Tensor]:
        return {k: g for found in simulate(lambda b: run(b, name), 3) for k, g in found.items()}

    expected, found = together("1f1b"), together(schedule)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_are_added_to_what_is_there_and_nobody_else_s_layers_are_touched() -> None:
    plain = deep()
    for seed in (0, 1):
        F.mse_loss(plain(batch(8, seed)[0]), batch(8, seed)[1]).backward()

    def run(backend: Backend) -> None:
        layers = deep()
        before = {name: value.clone() for name, value in layers.state_dict().items()}
        pipeline = piped(backend, layers)
        for seed in (0, 1):
            pipeline.train_step(*batch(8, seed), F.mse_loss)
        mine = dict(pipeline.named_parameters())
        for name, parameter in layers.named_parameters():
            assert torch.equal(parameter, before[name]), "no step has been taken"
            if name in mine:
                assert parameter is mine[name]
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
            else:
                assert parameter.grad is None

    simulate(run, 3)


def test_only_the_first_rank_needs_inputs_and_only_the_last_one_targets_and_loss() -> None:
    inputs, targets = batch(8)

    def run(backend: Backend) -> float:
        first, last = backend.rank == 0, backend.rank == backend.world_size - 1
        pipeline = piped(backend, deep())
        given = inputs if first else None, targets if last else None
        return pipeline.train_step(*given, F.mse_loss if last else None).item()  # type: ignore[arg-type]

    assert simulate(run, 4) == pytest.approx([F.mse_loss(deep()(inputs), targets).item()] * 4)


def test_stages_may_be_balanced_by_cost() -> None:
    costs = [8.0, 0.1] + [1.0, 0.1] * 5

    def run(backend: Backend) -> Any:
        stages = balance_stages(costs, backend.world_size)
        pipeline = piped(backend, deep(), stages=stages)
        assert pipeline.stages == stages
        return train_piped(pipeline, sgd, [batch(8)] * 2)

    per_rank = simulate(run, 3)
    assert list(per_rank[0][1]) == ["0.weight", "0.bias"]
    assert_same_training(per_rank, train_plainly(deep(), sgd, [batch(8)] * 2))


class Residual(nn.Module):
    """Passes on a tuple of a dict, a mask that needs no gradient, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, given: Any) -> Any:
        carried, mask, nothing = given
        out = torch.tanh(self.linear(carried["x"])) * mask
        return {"x": out, "sum": carried["sum"] + out.sum(1)}, mask, nothing


class Begin(nn.Module):
    def forward(self, given: dict[str, Tensor]) -> Any:
        x = given["x"]
        return {"x": x, "sum": x.sum(1)}, given["mask"], None


class End(nn.Module):
    def forward(self, given: Any) -> Tensor:
        carried, _, nothing = given
        assert nothing is None
        return carried["x"] + carried["sum"][:, None]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_pass_on_tuples_and_dicts_and_what_needs_no_gradient(schedule: str) -> None:
    def build() -> nn.Sequential:
        layers = [Begin(), *(Residual() for _ in range(6)), End()]
        return nn.Sequential(*layers)

    mask = noise(9, SIZE) > -0.5
    batches = [({"x": noise(9, SIZE, seed=s), "mask": mask}, noise(9, SIZE)) for s in range(2)]

    def run(backend: Backend) -> Any:
        return train_piped(piped(backend, seeded(build), 4, schedule), adam, batches)

    assert_same_training(simulate(run, 4), train_plainly(seeded(build), adam, batches))


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_activations_of_any_dtype_cross_between_stages(dtype: torch.dtype) -> None:
    def build() -> nn.Sequential:
        real = (Cast(torch.complex64), Real()) if dtype.is_complex else (Cast(torch.float32),)
        return nn.Sequential(nn.Linear(SIZE, SIZE), Cast(dtype), *real, nn.Linear(SIZE, SIZE))

    def run(backend: Backend) -> Any:
        return train_piped(piped(backend, seeded(build)), sgd, [batch(8)] * 2)

    assert_same_training(simulate(run, 4), train_plainly(seeded(build), sgd, [batch(8)] * 2))


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x).sum(-1)


def test_a_language_model_of_integers_and_another_length_each_step_trains_as_plainly() -> None:
    def build() -> nn.Sequential:
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(11, 8), block, nn.LayerNorm(8), nn.Linear(8, 11))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(11, (6, length + 1), generator=draw) for length in (5, 7, 5)]
    batches = [(text[:, :-1], text[:, 1:]) for text in texts]

    def run(backend: Backend) -> Any:
        return train_piped(piped(backend, seeded(build), 3), adam, batches, loss)

    plain = train_plainly(seeded(build), adam, batches, loss)
    assert_same_training(simulate(run, 4), plain)


def test_the_loss_weighs_micro_batches_by_their_samples() -> None:
    """Five samples as three micro-batches: the mean of the batch is not the mean of three means."""
    inputs, targets = torch.arange(5.0)[:, None], torch.zeros(5, 1)

    def run(backend: Backend) -> float:
        layers = nn.Sequential(nn.Identity(), nn.Linear(1, 1, bias=False))
        nn.init.ones_(layers[1].weight)  # type: ignore[arg-type]
        pipeline = piped(backend, layers, 3)
        return pipeline.train_step(inputs, targets, F.l1_loss).item()

    assert simulate(run, 2) == [2.0, 2.0]


def test_evaluate_gives_the_loss_in_eval_mode_and_leaves_everything_as_it_was() -> None:
    def build() -> nn.Sequential:
        pairs = [(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Dropout(0.5)) for _ in range(2)]
        return nn.Sequential(*(layer for pair in pairs for layer in pair))

    plain = seeded(build).eval()
    inputs, targets = batch(9)
    expected = F.mse_loss(plain(inputs), targets).item()

    def run(backend: Backend, schedule: str) -> None:
        pipeline = piped(backend, seeded(build), 4, schedule)
        frozen = next(iter(pipeline.module.modules()))
        frozen.training = False
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        modes = [module.training for module in pipeline.modules()]

        def looks(outputs: Tensor, wanted: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            return F.mse_loss(outputs, wanted)

        for rows in (9, 3, 1):  # fewer samples than micro-batches, too
            loss = pipeline.evaluate(inputs[:rows], targets[:rows], looks)
            if rows == 9:
                assert loss.item() == pytest.approx(expected)
        assert [module.training for module in pipeline.modules()] == modes
        for name, value in pipeline.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert all(parameter.grad is None for parameter in pipeline.parameters())

    for schedule in SCHEDULES:
        simulate(lambda backend, schedule=schedule: run(backend, schedule), 3)


def test_steps_and_evaluations_may_take_turns_while_layers_are_frozen_and_thawed() -> None:
    """Which tensors have a gradient changes; both ends of each wire notice."""

    def freeze(model: nn.Module, step: int) -> None:
        for name, parameter in model.named_parameters():
            layer = int(name.split(".")[0])
            trained = {0: layer >= 6, 1: True, 2: layer < 4, 3: layer >= 8}
            parameter.requires_grad_(trained[step])

    def gradients(model: nn.Module) -> dict[str, Tensor | None]:
        found = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return found

    plain, expected = deep(), []
    for step in range(4):
        freeze(plain, step)
        F.mse_loss(plain(batch(8, step)[0]), batch(8, step)[1]).backward()
        expected.append(gradients(plain))

    def run(backend: Backend) -> None:
        pipeline = piped(backend, deep())
        for step in range(4):
            freeze(pipeline, step)
            pipeline.evaluate(*batch(8, step), F.mse_loss)
            pipeline.train_step(*batch(8, step), F.mse_loss)
            for name, gradient in gradients(pipeline).items():
                if expected[step][name] is None:
                    assert gradient is None, f"step {step}: {name}"
                else:
                    torch.testing.assert_close(gradient, expected[step][name])

    simulate(run, 3)


class DropsTheRest(nn.Module):
    """Uses one of two tensors: nothing goes back for the other one."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def test_a_layer_that_no_gradient_reaches_keeps_none_and_not_zeros() -> None:
    def run(backend: Backend) -> None:
        pipeline = piped(backend, seeded(lambda: nn.Sequential(TwoHeads(), DropsTheRest())), 2)
        for _ in range(2):
            pipeline.train_step(*batch(4), F.mse_loss)
        for name, parameter in pipeline.named_parameters():
            assert (parameter.grad is None) == ("right" in name)

    simulate(run, 2)


def test_inputs_that_need_a_gradient_get_one() -> None:
    plain = batch(8)[0].requires_grad_()
    F.mse_loss(deep()(plain), batch(8)[1]).backward()

    def run(backend: Backend) -> Tensor | None:
        inputs = batch(8)[0].requires_grad_()
        piped(backend, deep()).train_step(inputs, batch(8)[1], F.mse_loss)
        return inputs.grad

    torch.testing.assert_close(simulate(run, 3)[0], plain.grad)


def test_dropout_draws_from_the_rank_s_own_random_state_and_batch_norm_sees_micro_batches() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm1d(SIZE), nn.Dropout(0.5), nn.Linear(SIZE, SIZE))

    def run(backend: Backend) -> tuple[float, Tensor | None]:
        torch.manual_seed(5 + backend.rank)
        pipeline = piped(backend, seeded(build), 2, stages=balance_stages([2, 1, 1], 2))
        loss = pipeline.train_step(*batch(8), F.mse_loss).item()
        return loss, pipeline.state_dict().get("0.running_mean")

    norm, *rest = seeded(build)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        parts = zip(batch(8)[0].chunk(2), batch(8)[1].chunk(2), strict=True)
        losses = [F.mse_loss(nn.Sequential(*rest)(norm(x)), y).item() for x, y in parts]
    results = simulate(run, 2)
    assert results[1][0] == pytest.approx(sum(losses) / 2)
    torch.testing.assert_close(results[0][1], norm.running_mean)


class Float32(nn.Module):
    """Computes in float32 under autocast, too: so do its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float()).exp()


def test_under_autocast_gradients_are_those_of_a_backward_pass_outside_of_it() -> None:
    def build() -> nn.Sequential:
        parts = [nn.Linear(SIZE, SIZE), Float32(), nn.LayerNorm(SIZE), Float32()]
        return nn.Sequential(*parts, nn.Linear(SIZE, SIZE))

    inputs, targets = batch(8)
    plain = seeded(build)
    for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(plain(x).float(), y) / 2
        loss.backward()

    def run(backend: Backend) -> None:
        pipeline = piped(backend, seeded(build), 2)
        with torch.autocast("cpu", torch.bfloat16):
            pipeline.train_step(inputs, targets, lambda y, t: F.mse_loss(y.float(), t))
        for name, parameter in pipeline.named_parameters():
            close = {"rtol": 1e-5, "atol": 1e-6} if "linear" in name else {"rtol": 0.1, "atol": 0.1}
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, **close)

    simulate(run, 2)


def test_two_pipelines_side_by_side_train_parts_of_the_ranks() -> None:
    """Data parallel, by hand: four ranks are two pipelines of two."""
    batches = [batch(8, seed) for seed in range(2)]

    def run(backend: Backend) -> Any:
        half = backend.rank // 2
        pipeline = piped(backend.subgroup([2 * half, 2 * half + 1]), deep())
        return train_piped(pipeline, sgd, [batches[half]])

    results = simulate(run, 4)
    for half in range(2):
        plain = train_plainly(deep(), sgd, [batches[half]])
        assert_same_training(results[2 * half : 2 * half + 2], plain)


def test_a_simulated_group_of_free_threads_is_enough() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    with backend:
        losses, values = train_piped(piped(backend, deep()), adam, [batch(8)] * 3)
    assert_same_training([(losses, values)], train_plainly(deep(), adam, [batch(8)] * 3))
