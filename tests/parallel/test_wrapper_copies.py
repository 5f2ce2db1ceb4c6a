"""`copy.deepcopy` of wrapped models: moving averages of the weights (EMA, SWA), and others."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from ddp_models import loss_of, mlp, noise, vectors
from ddp_runs import Watched, assert_close, assert_same_bits, gradients, mean_of, values
from local_runs import plain_sgd, sgd, take_step
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx import (
    DDP,
    Backend,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    MisuseError,
    TopK,
    UnsupportedObjectError,
    UnsupportedOperationError,
    simulate,
)

Wrap = Callable[[nn.Module, Backend], nn.Module]

WRAPS: dict[str, Wrap] = {
    "DDP": DDP,
    "LocalSGD": lambda model, backend: LocalSGD(model, backend, every=1),
    "DiLoCo": lambda model, backend: DiLoCo(model, backend, every=1, outer=plain_sgd),
}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
RANKS = 3


def averaged_gradients(step: int) -> dict[str, torch.Tensor]:
    """Of one plain model after `step`, on the batches of all ranks."""

    def one(rank: int):
        model = mlp()
        inputs, targets = vectors(4, seed=1000 * rank + step)
        loss_of(model(inputs), targets).backward()
        return gradients(model)

    return mean_of([one(rank) for rank in range(RANKS)])


@every_wrap
def test_an_ema_is_that_of_one_process(wrap: Wrap):
    decay = get_ema_multi_avg_fn(0.9)

    def train(model: nn.Module, ranks: list[int]) -> tuple[nn.Module, list[int]]:
        ema = AveragedModel(model, multi_avg_fn=decay, use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            optimizer.zero_grad()
            for rank in ranks:
                inputs, targets = vectors(4, seed=1000 * rank + number)
                (loss_of(model(inputs), targets) / len(ranks)).backward()
            optimizer.step()
            ema.update_parameters(model)
        return ema, ema(noise(5, 6)).detach()

    def run(backend: Backend):
        ema, outputs = train(wrap(mlp(), backend), [backend.rank])
        return {**values(ema.module.module), "outputs": outputs}

    found = simulate(run, RANKS)
    ema, outputs = train(mlp(), list(range(RANKS)))
    assert_same_bits(list(found))
    expected = {**values(ema.module), "outputs": outputs}
    assert_close(found[0], expected, rtol=1e-4, atol=1e-6)


@every_wrap
def test_one_rank_alone_may_copy_and_evaluate(wrap: Wrap):
    def run(backend: Backend) -> None:
        model = wrap(mlp(), backend)
        watched = Watched(backend)
        if backend.rank == 1:
            ema = AveragedModel(model)
            ema.update_parameters(model)
            ema.eval()(noise(2, 6))
        assert watched.events == []
        take_step(model, sgd(model.parameters()), backend.rank, 0)

    simulate(run, RANKS)


def test_a_copy_of_a_ddp_averages_its_own_gradients():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        first = copy.deepcopy(ddp)
        for number, model in enumerate((ddp, first, copy.deepcopy(first))):
            inputs, targets = vectors(4, seed=1000 * backend.rank + number)
            loss_of(model(inputs), targets).backward()
            assert_close(gradients(model), averaged_gradients(number))
        assert first.bytes_sent == ddp.bytes_sent
        assert_close(gradients(ddp), averaged_gradients(0))

    simulate(run, RANKS)


def test_a_copy_of_a_ddp_goes_on_with_what_its_compressor_has_left_over():
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend, compression=ErrorFeedback(TopK(0.1)))
        take_step(ddp, sgd(ddp.parameters()), backend.rank, 0)
        other = copy.deepcopy(ddp)
        assert_same_bits([ddp.own_state(), other.own_state()])
        for model in (ddp, other):
            take_step(model, sgd(model.parameters()), backend.rank, 1)
        assert_same_bits([values(ddp), values(other)])
        assert_same_bits([ddp.own_state(), other.own_state()])

    simulate(run, RANKS)


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_a_copy_counts_its_own_steps_and_keeps_its_own_outer_state(kind: str):
    def wrap(backend: Backend) -> nn.Module:
        if kind == "LocalSGD":
            return LocalSGD(mlp(), backend, every=2, compression=TopK(0.2))
        outer = lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9)  # noqa: E731
        return DiLoCo(mlp(), backend, every=2, outer=outer)

    def run(backend: Backend) -> None:
        def steps(model: nn.Module, first: int, last: int) -> nn.Module:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(first, last):
                take_step(model, optimizer, backend.rank, number)
            return model

        model = steps(wrap(backend), 0, 3)
        other = copy.deepcopy(model)
        steps(model, 10, 14)  # on other batches: nothing of it is the copy's
        steps(other, 3, 6)
        assert (model.steps, other.steps) == (7, 6)
        assert_same_bits([values(steps(wrap(backend), 0, 6)), values(other)])

    simulate(run, RANKS)


@every_wrap
def test_a_copy_does_not_keep_the_original(wrap: Wrap):
    def run(backend: Backend) -> None:
        model = wrap(mlp(), backend)
        take_step(model, sgd(model.parameters()), backend.rank, 0)
        other = copy.deepcopy(model)
        alive = [weakref.ref(model), *map(weakref.ref, model.parameters())]
        del model
        gc.collect()
        assert [reference() for reference in alive] == [None] * len(alive)
        take_step(other, sgd(other.parameters()), backend.rank, 1)

    simulate(run, 2)


@every_wrap
def test_what_cannot_be_copied_or_pickled_says_so(wrap: Wrap):
    def run(backend: Backend) -> None:
        model = wrap(mlp(), backend)
        with pytest.raises(UnsupportedObjectError, match=r"pickle the state_dict\(\)"):
            pickle.dumps(model)
        model.module.lock = threading.Lock()
        with pytest.raises(UnsupportedOperationError, match=r"it cannot be copied: .*lock"):
            copy.deepcopy(model)

    simulate(run, 2)


def test_in_averaged_there_is_no_copy():
    def run(backend: Backend) -> None:
        model = LocalSGD(mlp(), backend, every=2)
        with model.averaged(), pytest.raises(MisuseError, match="a copy inside averaged"):
            copy.deepcopy(model)

    simulate(run, 2)


def test_a_model_that_holds_a_ddp_is_copied_with_it():
    def run(backend: Backend) -> None:
        model = nn.Sequential(DDP(mlp(), backend))
        other = copy.deepcopy(model)
        assert other[0].backend is backend
        inputs, targets = vectors(4, seed=1000 * backend.rank)
        loss_of(other(inputs), targets).backward()
        assert_close(gradients(other[0].module), averaged_gradients(0))

    simulate(run, RANKS)
