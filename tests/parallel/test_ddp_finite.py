"""`skip_nonfinite`: a step is skipped everywhere if one rank's gradients are not finite."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from clusters import Cluster
from ddp_models import Branches, mlp, noise, seeded
from ddp_runs import Watched, assert_same_bits, gradients, values
from torch import Tensor, nn

from phalanx import DDP, Backend, simulate

BAD = [math.inf, -math.inf, math.nan]


class Poisoned(nn.Module):
    """Layers, of which one may be told to have a gradient of some value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.poison: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        extra = x.new_zeros(())
        for name, value in self.poison.items():
            parameter = self.get_parameter(name)
            extra = extra + (parameter * torch.full_like(parameter, value)).sum()
        return x.pow(2).sum() + extra


def step(ddp: DDP, seed: int, poison: dict[str, float]) -> None:
    ddp.module.poison = poison
    ddp(noise(4, 6, seed=seed)).backward()


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 200, 1 << 20])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_one_bad_gradient_on_any_rank_skips_the_step_on_all(culprit, value, bucket_size):
    def run(backend: Backend):
        ddp = DDP(seeded(Poisoned), backend, bucket_size=bucket_size, skip_nonfinite=True)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, weight_decay=0.5)
        states = []
        for number in range(4):
            optimizer.zero_grad()
            bad = number in (1, 2) and backend.rank == culprit
            step(ddp, 10 * number + backend.rank, {"layers.1.bias": value} if bad else {})
            if number in (1, 2):
                assert all(grad is None for grad in gradients(ddp).values())
            optimizer.step()
            states.append(values(ddp))
        assert_same_bits(states[:3])  # steps 1 and 2 have changed nothing
        assert not torch.equal(states[2]["layers.1.bias"], states[3]["layers.1.bias"])
        assert ddp.skipped_steps == 2
        assert ddp.last_skip == (2, {culprit: "layers.1.bias"})
        return states[-1]

    assert_same_bits(list(simulate(run, 3)))


def test_it_works_on_every_kind_of_backend(cluster: Cluster):
    models = [seeded(Poisoned) for _ in range(3)]

    def run(backend: Backend):
        ddp = DDP(models[backend.rank], backend, skip_nonfinite=True)
        step(ddp, backend.rank, {"layers.0.weight": math.nan} if backend.rank == 1 else {})
        return ddp.last_skip

    assert cluster.run(run, 3) == [(0, {1: "layers.0.weight"})] * 3


@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
def test_every_rank_is_named_with_the_first_parameter_of_the_model(bucket_size: int, caplog):
    poison = {
        0: {"layers.2.weight": math.nan, "layers.1.weight": math.inf},
        1: {},
        2: {"layers.2.bias": math.nan, "layers.0.bias": -math.inf},
    }

    def run(backend: Backend):
        ddp = DDP(seeded(Poisoned), backend, bucket_size=bucket_size, skip_nonfinite=True)
        step(ddp, 0, poison[backend.rank])
        return ddp.last_skip

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        found = list(simulate(run, 3))
    assert found == [(0, {0: "layers.1.weight", 2: "layers.0.bias"})] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    for line in lines:
        assert "step 0 is skipped" in line
        assert "layers.1.weight on rank 0; layers.0.bias on rank 2" in line


def test_an_average_too_large_for_its_dtype_skips_the_step_too():
    def run(backend: Backend):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float32)
        ddp = DDP(model, backend, skip_nonfinite=True)
        (ddp(torch.ones(1, 2)) * 3e38).sum().backward()
        return ddp.last_skip, model.weight.grad

    for skip, grad in simulate(run, 3):
        assert grad is None
        assert skip == (0, {-1: "weight"})


def test_finite_gradients_whose_sum_is_too_large_skip_nothing():
    def run(backend: Backend):
        model = nn.Linear(3, 1, bias=False)
        ddp = DDP(model, backend, skip_nonfinite=True)
        (ddp(torch.ones(1, 3)) * 1.5e38).sum().backward()
        return ddp.skipped_steps, model.weight.grad

    for skipped, grad in simulate(run, 2):
        assert skipped == 0
        assert grad.isfinite().all()


def test_without_the_option_the_gradients_are_what_they_are():
    def run(backend: Backend) -> bool:
        ddp = DDP(seeded(Poisoned), backend)
        step(ddp, 0, {"layers.0.bias": math.nan} if backend.rank else {})
        assert ddp.skipped_steps == 0
        assert ddp.last_skip is None
        return bool(ddp.module.layers[0].bias.grad.isnan().all())

    assert list(simulate(run, 2)) == [True, True]


def test_finite_steps_have_the_same_bits_with_the_option():
    def run(backend: Backend, option: bool):
        ddp = DDP(mlp(), backend, skip_nonfinite=option)
        ddp(noise(4, 6, seed=backend.rank)).sum().backward()
        return gradients(ddp)

    assert_same_bits([simulate(lambda b, o=o: run(b, o), 3)[0] for o in (True, False)])


@pytest.mark.parametrize("bad_micro_batch", [0, 1])
def test_a_bad_micro_batch_skips_the_whole_accumulated_step_and_nothing_later(bad_micro_batch):
    def run(backend: Backend):
        ddp = DDP(seeded(Poisoned), backend, skip_nonfinite=True)

        def poison(number: int) -> dict[str, float]:
            bad = number == bad_micro_batch and backend.rank == 1
            return {"layers.0.bias": math.inf} if bad else {}

        with ddp.no_sync():
            step(ddp, backend.rank, poison(0))
        step(ddp, backend.rank + 5, poison(1))
        assert all(grad is None for grad in gradients(ddp).values())
        assert ddp.skipped_steps == 1
        with ddp.no_sync():
            step(ddp, backend.rank, {})
        ddp.sync_gradients()
        assert ddp.skipped_steps == 1
        return gradients(ddp)

    found = list(simulate(run, 2))
    assert_same_bits(found)
    assert all(grad is not None for grad in found[0].values())


def test_what_a_pass_that_failed_has_found_skips_no_later_step():
    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    def run(backend: Backend) -> int:
        ddp = DDP(seeded(Poisoned), backend, bucket_size=1, skip_nonfinite=True)
        handle = ddp.module.layers[0].weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            step(ddp, 0, {"layers.2.bias": math.nan} if backend.rank else {})
        handle.remove()
        ddp.zero_grad()
        step(ddp, 1, {})
        return ddp.skipped_steps

    assert list(simulate(run, 2)) == [0, 0]


def test_a_loss_of_no_samples_skips_nothing():
    def run(backend: Backend) -> int:
        ddp = DDP(mlp(), backend, skip_nonfinite=True)
        loss = ddp(noise(4, 6)).mean() * (math.nan if backend.rank else 1.0)
        ddp.weighted(loss, 0 if backend.rank else 4).backward()
        return ddp.skipped_steps

    assert list(simulate(run, 2)) == [0, 0]


def test_unused_parameters_and_the_option_go_together():
    def run(backend: Backend):
        ddp = DDP(seeded(Branches), backend, find_unused_parameters=True, skip_nonfinite=True)
        for scale in (1.0, math.nan, 1.0):
            ddp.zero_grad()
            bad = scale if backend.rank == 0 else 1.0
            (ddp(noise(4, 6), "left").sum() * bad).backward()
        assert ddp.skipped_steps == 1
        return {name for name, grad in gradients(ddp).items() if grad is None}

    assert list(simulate(run, 2)) == [{"right.weight", "right.bias"}] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_of_gradients_is_looked_at(dtype: torch.dtype):
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=dtype))
            self.empty = nn.Parameter(torch.empty(0, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (self.scale * x).sum() + self.empty.sum()

    def run(backend: Backend) -> list[int]:
        ddp = DDP(Scale(), backend, skip_nonfinite=True)
        counts = []
        for bad in (1.0, math.inf, 1.0, math.nan):
            x = torch.tensor([1.0, bad if backend.rank else 1.0, 1.0], dtype=dtype)
            ddp.zero_grad()
            loss = ddp(x)
            (loss.real if loss.is_complex() else loss).backward()
            counts.append(ddp.skipped_steps)
        return counts

    assert list(simulate(run, 2)) == [[0, 1, 1, 2]] * 2


def test_it_costs_one_message_of_8_bytes():
    def run(backend: Backend) -> tuple[list[str], int]:
        sent = []
        for option in (True, False):
            ddp = DDP(mlp(), backend, skip_nonfinite=option)
            ddp(noise(4, 6)).sum().backward()
            watched = Watched(backend)
            ddp(noise(4, 6)).sum().backward()
            sent.append(watched.bytes_sent)
        return sent[0] - sent[1]

    assert list(simulate(run, 2)) == [8, 8]
