"""The naive forms are the papers' algorithms; LocalSGD and DiLoCo, beside them, train alike."""

from __future__ import annotations

from typing import Any

import pytest
from clusters import Cluster
from ddp_models import TASKS, loss_of, mlp
from ddp_runs import assert_close, assert_same_bits
from local_runs import (
    MakeOptimizer,
    Values,
    adamw,
    nesterov,
    plain_sgd,
    reference,
    sgd,
    take_step,
    values,
)
from torch import nn

from phalanx import Backend, DiLoCo, LocalSGD, simulate
from phalanx.parallel.naive_local_sgd import naive_diloco, naive_local_sgd

STEPS, EVERY = 7, 3  # two periods, and a step of the third
OUTER = {"local sgd": None, "diloco": nesterov, "diloco, rate 1": plain_sgd}
INNER = {"sgd": sgd, "adamw": adamw}


def train_naively(module: nn.Module, backend: Backend, step: Any, outer: Any) -> None:
    if outer is None:
        naive_local_sgd(module, backend, step, steps=STEPS, every=EVERY)
    else:
        naive_diloco(module, backend, step, steps=STEPS, every=EVERY, outer=outer)


def wrapped(module: nn.Module, backend: Backend, outer: Any) -> LocalSGD | DiLoCo:
    if outer is None:
        return LocalSGD(module, backend, every=EVERY)
    return DiLoCo(module, backend, every=EVERY, outer=outer)


@pytest.mark.checkered
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_the_naive_form_is_the_algorithm_without_ranks(outer: MakeOptimizer | None, ranks: int):
    def run(backend: Backend) -> Values:
        module = mlp()
        optimizer = adamw(module.parameters())

        def step(number: int) -> None:
            take_step(module, optimizer, backend.rank, number)

        train_naively(module, backend, step, outer)
        return values(module)

    expected = reference(ranks, [3, 6], STEPS, inner=adamw, outer=outer)
    assert_close(simulate(run, ranks)[0], expected, rtol=1e-4, atol=1e-6)


def train_beside(backend: Backend, models: list[nn.Module], batch: Any, inner: Any, outer: Any):
    """Parameters after each step, of the naive form and of the fast one."""
    found: list[list[Values]] = [[], []]

    def step_of(model: nn.Module, seen: list[Values]) -> Any:
        optimizer = inner(model.parameters())

        def step(number: int) -> None:
            seen.append(values(model))  # as they are after the step before, and its sync
            inputs, targets = batch(4, 10 * number + backend.rank)
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()

        return step

    naive, fast = models[0], wrapped(models[1], backend, outer)
    train_naively(naive, backend, step_of(naive, found[0]), outer)
    step = step_of(fast, found[1])
    for number in range(1, STEPS + 1):
        step(number)
    return [[*seen, values(model)] for seen, model in zip(found, (naive, fast), strict=True)]


@pytest.mark.checkered
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
@pytest.mark.parametrize("task", TASKS)
def test_the_fast_form_has_the_same_parameters_after_each_step(
    task: str, outer: MakeOptimizer | None, inner: MakeOptimizer
):
    build, batch = TASKS[task]

    def run(backend: Backend) -> list[list[Values]]:
        return train_beside(backend, [build(seed=0), build(seed=0)], batch, inner, outer)

    ranks = list(simulate(run, 3))
    for naive, fast in ranks:
        for expected, found in zip(naive, fast, strict=True):
            assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for after in (0, EVERY, 2 * EVERY):
        assert_same_bits([fast[after] for _, fast in ranks])


def test_the_fast_form_is_the_algorithm_on_every_kind_of_backend(cluster: Cluster):
    models = [[mlp(rank), mlp(rank)] for rank in range(3)]

    def run(backend: Backend) -> list[Values]:
        found = []
        for outer, module in zip((None, nesterov), models[backend.rank], strict=True):
            model = wrapped(module, backend, outer)
            optimizer = adamw(model.parameters())
            for number in range(1, 2 * EVERY + 1):
                take_step(model, optimizer, backend.rank, number)
            found.append(values(model))
        return found

    for outer, found in zip((None, nesterov), zip(*cluster.run(run, 3), strict=True), strict=True):
        assert_same_bits(list(found))
        expected = reference(3, [EVERY, 2 * EVERY], 2 * EVERY, inner=adamw, outer=outer)
        assert_close(found[0], expected, rtol=1e-4, atol=1e-6)
