"""After `backward()`, every gradient is the mean over the ranks: that of the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import TASKS, DefinedBackwards, loss_of, mlp, noise, seeded, vectors
from ddp_runs import (
    Gradients,
    assert_close,
    gradients,
    mean_of,
    naive_gradients,
    rows_of,
)
from torch import Tensor, nn

from phalanx import DDP, Backend, simulate

Inputs = Callable[[int], Any]


def expected(
    build: Callable[[], nn.Module], inputs: Inputs, world_size: int = 3, passes: int = 3
) -> Gradients:
    """Those of a naive DDP after the last of these steps."""

    def step(model: nn.Module, rank: int) -> None:
        model(inputs(rank + 10 * (passes - 1))).pow(2).sum().backward()

    return naive_gradients(lambda: seeded(build), world_size, step)


def rows(seed: int) -> Tensor:
    return noise(4, 6, seed=seed)


@pytest.mark.checkered
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("task", TASKS)
def test_gradients_equal_the_single_process_gradients_of_the_joined_batch(task, world_size):
    build, batch = TASKS[task]
    inputs, targets = batch(12)
    plain = build()
    loss_of(plain(inputs), targets).backward()

    def run(backend: Backend) -> list[Gradients]:
        ddp = DDP(build(), backend, bucket_size=200)
        found = []
        for _ in range(3):  # the second pass has other buckets than the first
            ddp.zero_grad()
            loss_of(ddp(rows_of(inputs, backend)), rows_of(targets, backend)).backward()
            found.append(gradients(ddp))
        return found

    for found in simulate(run, world_size):
        for each in found:
            assert_close(each, gradients(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", [mlp, lambda: seeded(DefinedBackwards)])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_zeroed_or_dropped(build, set_to_none: bool):
    def run(backend: Backend) -> Gradients:
        ddp = DDP(build(), backend)
        for number in range(3):
            ddp.zero_grad(set_to_none=set_to_none)
            ddp(rows(backend.rank + 10 * number)).pow(2).sum().backward()
        return gradients(ddp)

    for found in simulate(run, 3):
        assert_close(found, expected(build, rows))


@pytest.mark.parametrize("bucket_size", [1, 1 << 30])
def test_two_backward_passes_in_one_step_add_up(bucket_size: int):
    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend, bucket_size=bucket_size)
        for seed in (0, 10, 20):
            ddp(rows(backend.rank + seed)).pow(2).sum().backward()
        return gradients(ddp)

    parts = [expected(mlp, lambda rank, s=s: rows(rank + s), passes=1) for s in (0, 10, 20)]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    for found in simulate(run, 3):
        assert_close(found, total)


def test_two_backward_passes_through_one_graph_add_up():
    def run(backend: Backend) -> tuple[Gradients, Gradients]:
        ddp = DDP(mlp(), backend)
        loss = ddp(rows(backend.rank)).pow(2).sum()
        loss.backward(retain_graph=True)
        once = gradients(ddp)
        loss.backward()
        return once, gradients(ddp)

    for once, twice in simulate(run, 3):
        assert_close(twice, {name: 2 * grad for name, grad in once.items()})


def test_two_forward_passes_may_share_one_backward_pass():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend)
        first, second = (ddp(rows(backend.rank + seed)).pow(2).sum() for seed in (0, 10))
        (first + second).backward()
        return gradients(ddp)

    parts = [expected(mlp, lambda rank, s=s: rows(rank + s), passes=1) for s in (0, 10)]
    for found in simulate(run, 3):
        assert_close(found, {name: sum(part[name] for part in parts) for name in parts[0]})


def test_a_loss_may_be_computed_in_a_module_that_returns_tuples_and_dictionaries():
    class Answers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            return {"loss": y.pow(2).sum(), "more": (y, [x, None, "text"])}

    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(Answers), backend)
        answers = ddp(rows(backend.rank))
        assert answers["more"][1][1:] == [None, "text"]
        answers["loss"].backward()
        return gradients(ddp)

    wanted = naive_gradients(
        lambda: seeded(Answers), 3, lambda model, rank: model(rows(rank))["loss"].backward()
    )
    for found in simulate(run, 3):
        assert_close(found, wanted)


def test_gradients_of_gradients_can_be_taken():
    """A penalty on the gradient with respect to the inputs, which is differentiated again."""

    def penalty(model: nn.Module, rank: int) -> Tensor:
        x = rows(rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        return slope.pow(2).sum()

    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend, find_unused_parameters=True)
        penalty(ddp, backend.rank).backward()
        return gradients(ddp)

    wanted = naive_gradients(mlp, 2, lambda model, rank: penalty(model, rank).backward())
    for found in simulate(run, 2):
        assert_close(found, wanted)


def test_gradients_with_respect_to_inputs_only_touch_no_parameter():
    def run(backend: Backend) -> tuple[bool, Gradients]:
        ddp = DDP(mlp(), backend, find_unused_parameters=True)
        x = rows(backend.rank).requires_grad_()
        torch.autograd.grad(ddp(x).sum(), x)
        untouched = all(p.grad is None for p in ddp.parameters())
        ddp(rows(backend.rank)).pow(2).sum().backward()
        return untouched, gradients(ddp)

    for untouched, found in simulate(run, 3):
        assert untouched
        assert_close(found, expected(mlp, rows, passes=1))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_may_create_a_graph():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend)
        for number in range(3):
            ddp.zero_grad()
            ddp(rows(backend.rank + 10 * number)).pow(2).sum().backward(create_graph=True)
        found = gradients(ddp)
        ddp.zero_grad()  # breaks the cycle between a parameter and its gradient's graph
        return found

    for found in simulate(run, 3):
        assert_close(found, expected(mlp, rows))


def test_two_models_on_one_backend_train_against_each_other():
    def losses(make: Any, critic: Any, rank: int) -> tuple[Tensor, Tensor]:
        return critic(make(rows(rank))).pow(2).sum(), critic(rows(rank + 10)).sum()

    def build() -> tuple[nn.Module, nn.Module]:
        return seeded(lambda: nn.Linear(6, 6)), seeded(lambda: nn.Linear(6, 2), 1)

    def step(make: nn.Module, critic: nn.Module, rank: int) -> list[Gradients]:
        losses(make, critic, rank)[0].backward()
        found = [gradients(make)]
        critic.zero_grad()
        losses(make, critic, rank)[1].backward()
        return [*found, gradients(critic)]

    alone = [step(*build(), rank) for rank in range(3)]

    def run(backend: Backend) -> list[Gradients]:
        make, critic = (DDP(model, backend, bucket_size=1) for model in build())
        return step(make, critic, backend.rank)

    for found in simulate(run, 3):
        for place in range(2):
            assert_close(found[place], mean_of([each[place] for each in alone]))


def test_gradients_may_be_read_on_one_rank_and_not_on_another_before_the_next_step():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(mlp(), backend)
        for _, seed in zip(range(3), (5, 6, 7), strict=True):
            ddp.zero_grad()
            x, y = vectors(3, seed + backend.rank)
            loss_of(ddp(x), y).backward()
            if backend.rank == 1:
                nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        return gradients(ddp) if backend.rank == 0 else {}

    plain = [mlp() for _ in range(2)]
    for rank, each in enumerate(plain):
        x, y = vectors(3, 7 + rank)
        loss_of(each(x), y).backward()
    assert_close(simulate(run, 2)[0], mean_of([gradients(each) for each in plain]))
