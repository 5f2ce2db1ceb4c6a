"""DiLoCo: an outer optimizer steps by the mean of how far ranks have come alone."""

from __future__ import annotations

import logging

import pytest
import torch
from ddp_models import mlp, noise
from ddp_runs import Watched, assert_close, assert_same_bits
from local_runs import adamw, nesterov, plain_sgd, reference, sgd, take_step, values
from torch import nn

from phalanx import (
    Backend,
    DesyncError,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    PowerSGD,
    Quantized,
    TopK,
    simulate,
)
from phalanx.compression.error_feedback import total_residual

COMPRESSORS = {
    "4 bits": lambda: Quantized(4, block=16),
    "4 bits, error feedback": lambda: ErrorFeedback(Quantized(4, block=16)),
    "top-k, error feedback": lambda: ErrorFeedback(TopK(0.2)),
    "PowerSGD, error feedback": lambda: ErrorFeedback(PowerSGD(1)),
}
EXACT = {"top-k": lambda: ErrorFeedback(TopK(1)), "PowerSGD": lambda: ErrorFeedback(PowerSGD(99))}
FEEDBACK = [name for name in COMPRESSORS if "feedback" in name]


def train(backend: Backend, steps: int, *, inner=adamw, make=mlp, **options) -> DiLoCo:
    model = DiLoCo(make(), backend, **{"outer": nesterov, "every": 2, **options})
    optimizer = inner(model.parameters())
    for number in range(1, steps + 1):
        take_step(model, optimizer, backend.rank, number)
    return model


@pytest.mark.parametrize("every", [1, 2, 5])
def test_with_an_outer_rate_of_1_it_is_local_sgd(every: int):
    def local(backend: Backend):
        model = LocalSGD(mlp(), backend, every=every)
        optimizer = sgd(model.parameters())
        for number in range(1, 6):
            take_step(model, optimizer, backend.rank, number)
        model.sync()
        return values(model)

    def diloco(backend: Backend):
        model = train(backend, 5, inner=sgd, outer=plain_sgd, every=every)
        model.sync()
        return values(model)

    found = simulate(diloco, 3)
    assert_same_bits(list(found))
    assert_close(found[0], simulate(local, 3)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_any_optimizer_can_be_the_outer_one(outer):
    def make(parameters):
        return outer(parameters, lr=0.01, eps=1e-3)

    found = simulate(lambda b: values(train(b, 4, outer=make)), 2)
    assert_same_bits(list(found))
    expected = reference(2, [2, 4], 4, inner=adamw, outer=make)
    assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


def test_on_one_rank_outer_steps_are_taken_too():
    found = simulate(lambda b: values(train(b, 5)), 1)[0]
    assert_close(found, reference(1, [2, 4], 5, inner=adamw, outer=nesterov))


@pytest.mark.parametrize("name", EXACT)
def test_a_compressor_that_leaves_nothing_out_changes_nothing(name: str):
    found = simulate(lambda b: values(train(b, 4, compression=EXACT[name]())), 2)
    assert_same_bits(list(found))
    expected = reference(2, [2, 4], 4, inner=adamw, outer=nesterov)
    assert_close(found[0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_ranks_are_the_same_bits_after_each_sync(name: str):
    def run(backend: Backend):
        model = DiLoCo(mlp(), backend, every=2, outer=nesterov, compression=COMPRESSORS[name]())
        optimizer = adamw(model.parameters())
        found = {}
        for number in range(6):
            take_step(model, optimizer, backend.rank, number)
            if number % 2:
                found |= {f"{number}.{k}": value for k, value in values(model).items()}
        return found

    assert_same_bits(list(simulate(run, 3)))


@pytest.mark.parametrize("name", FEEDBACK)
def test_outer_gradients_that_came_and_what_is_left_over_are_all_that_there_were(name: str):
    """With an outer rate of 1 what has come is how far the parameters have gone."""

    def run(backend: Backend):
        model = DiLoCo(mlp(), backend, every=2, outer=plain_sgd, compression=COMPRESSORS[name]())
        optimizer = sgd(model.parameters())
        began, gone = values(model), {}
        for number in range(6):
            if number % 2 == 0:
                before = values(model)
            inputs = noise(4, 6, seed=10 * number + backend.rank)
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            taken: dict = {}  # an optimizer's own hooks come before the sync
            hook = optimizer.register_step_post_hook(
                lambda *_, taken=taken: taken.update(values(model))
            )
            optimizer.step()
            hook.remove()
            if number % 2:
                for key, value in taken.items():
                    gone[key] = gone.get(key, 0) + (before[key] - value).double()
        came = {key: (began[key] - value).double() for key, value in values(model).items()}
        state = {k.split(".", 1)[1]: v for k, v in model.own_state().items() if "compression@" in k}
        return came, gone, state

    came, gone, states = zip(*simulate(run, 3), strict=True)
    missing = total_residual(list(states), 3)
    for key, value in came[0].items():
        mean = sum(one[key] for one in gone) / 3
        total = value.flatten() + missing[key]
        torch.testing.assert_close(total, mean.flatten(), rtol=0, atol=1e-6)


def test_quantized_outer_gradients_are_a_fraction_of_the_bytes():
    def run(backend: Backend, compression) -> int:
        model = DiLoCo(
            nn.Linear(64, 64, bias=False),
            backend,
            every=2,
            outer=nesterov,
            compression=compression,
        )
        optimizer = sgd(model.parameters())
        watched = Watched(backend)
        for number in range(4):
            model(noise(2, 64, seed=number)).sum().backward()
            optimizer.step()
        hashes = 2 * 8  # of what the outer gradients are relative to
        assert model.bytes_sent + hashes == watched.bytes_sent
        return model.bytes_sent

    dense = simulate(lambda b: run(b, None), 2)[0]
    quantized = simulate(lambda b: run(b, ErrorFeedback(Quantized(4))), 2)[0]
    assert dense == 2 * 64 * 64 * 4  # two syncs; 2(p-1)/p of the parameters each
    assert quantized == 2 * 64 * 64 // 2 + 2 * 16 * 4  # half a byte each, and a scale for 256


def test_the_compressor_and_the_outer_optimizer_are_this_module_s_own():
    shared = ErrorFeedback(TopK(0.1))

    def run(backend: Backend) -> None:
        model = train(backend, 2, compression=shared)
        assert model.compression is not shared
        assert model.compression.residual("0.weight").any()
        assert type(model.outer_optimizer) is torch.optim.SGD
        for group in model.outer_optimizer.param_groups:
            group["lr"] = 0.0  # a schedule of the outer rate
        before = values(model)
        for group in model.outer_optimizer.param_groups:
            group["momentum"] = 0.0
        optimizer = sgd(model.parameters())
        for number in range(2):
            take_step(model, optimizer, backend.rank, number)
        assert_same_bits([before, values(model)])

    simulate(run, 2)
    assert shared.residual("0.weight") is None


@pytest.mark.parametrize("compression", [None, ErrorFeedback(Quantized(4, block=16))])
def test_an_outer_gradient_that_is_not_finite_is_a_step_that_nobody_takes(compression, caplog):
    def run(backend: Backend):
        model = train(backend, 2, inner=sgd, compression=compression)
        before, own = values(model), dict(model.own_state())
        optimizer = sgd(model.parameters())
        for number in range(2):
            if backend.rank == 1:
                with torch.no_grad():
                    model.module[2].bias[3] = float("inf")
            take_step(model, optimizer, backend.rank, number)
        assert_same_bits([before, values(model)])
        for key, value in model.own_state().items():
            assert key.endswith("count") or torch.equal(value, own[key]), key
        assert model.skipped_steps == 1
        fresh = sgd(model.parameters())
        for number in range(2):
            take_step(model, fresh, backend.rank, number)
        assert model.skipped_steps == 1
        return values(model)

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        found = simulate(run, 2)
    assert_same_bits(list(found))
    assert all(value.isfinite().all() for value in found[0].values())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("an outer step is skipped on every rank" in m for m in messages)
    assert all("on rank 1. That rank's own optimizer" in m for m in messages)


def test_it_learns_with_few_outer_steps_in_4_bits():
    def run(backend: Backend) -> float:
        target = noise(6, 3, seed=9)
        model = DiLoCo(
            nn.Linear(6, 3),
            backend,
            every=10,
            outer=lambda params: torch.optim.SGD(params, lr=0.9, momentum=0.3, nesterov=True),
            compression=ErrorFeedback(Quantized(4)),
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(60):
            x = noise(8, 6, seed=1000 * backend.rank + number)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x @ target)
            loss.backward()
            optimizer.step()
        x = noise(64, 6, seed=7)
        model.sync()
        return nn.functional.mse_loss(model(x), x @ target).item()

    assert max(simulate(run, 2)) < 0.05


def test_ranks_that_have_loaded_different_things_are_told_the_first_that_differs():
    """As from state dicts of LocalSGD between two averages, which have no copies to begin from."""

    def run(backend: Backend) -> None:
        model = train(backend, 1)
        local = LocalSGD(mlp(), backend, every=4)
        take_step(local, sgd(local.parameters()), backend.rank, 0)
        model.load_state_dict(local.state_dict())
        with pytest.raises(
            DesyncError, match=r"differ: rank 1 has 0\.weight .* Load the same state"
        ):
            model.sync()

    simulate(run, 2)
