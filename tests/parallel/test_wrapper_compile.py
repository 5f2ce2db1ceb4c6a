"""torch.compile of wrapped models, and of what is wrapped: as the plain model without it.

With the backend "aot_eager", which needs no compiler: everything but the code of the kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from ddp_models import DefinedBackwards, TiedTransformer, loss_of, noise, seeded, sentences, vectors
from ddp_runs import assert_close, assert_same_bits, gradients, mean_of, values
from local_runs import nesterov, sgd
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from phalanx import DDP, Backend, DiLoCo, ErrorFeedback, LocalSGD, TopK, simulate

RANKS = 2
BACKEND = "aot_eager"

OTHERS: dict[str, Callable[[nn.Module, Backend], nn.Module]] = {
    "DDP unused": lambda m, b: DDP(m, b, find_unused_parameters=True, bucket_size=1),
    "DDP compressed": lambda m, b: DDP(m, b, compression=ErrorFeedback(TopK(0.3))),
    "LocalSGD": lambda m, b: LocalSGD(m, b, every=2),
    "DiLoCo": lambda m, b: DiLoCo(m, b, every=2, outer=nesterov),
}


class WithStatistics(nn.Module):
    """Buffers, which change in each forward pass, and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: torch.tanh(self.inner(x)), self.norm(x), use_reentrant=False)
        return self.last(x)


MODELS = {
    "linear": (lambda: seeded(DefinedBackwards), vectors),
    "transformer": (lambda: seeded(TiedTransformer), sentences),
    "statistics": (lambda: seeded(WithStatistics), vectors),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_outside(build, wrap, backend: Backend):
    wrapped = wrap(build(), backend)
    return wrapped, torch.compile(wrapped, backend=BACKEND)


def compiled_inside(build, wrap, backend: Backend):
    module = build()
    module.compile(backend=BACKEND)
    wrapped = wrap(module, backend)
    return wrapped, wrapped


def compiled_in_place(build, wrap, backend: Backend):
    wrapped = wrap(build(), backend)
    wrapped.compile(backend=BACKEND)
    return wrapped, wrapped


WAYS = [compiled_outside, compiled_inside, compiled_in_place]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def train(wrapped: nn.Module, called: nn.Module, rank: int, draw=vectors, steps: int = 4):
    optimizer = sgd(wrapped.parameters())
    for number in range(steps):
        inputs, targets = draw(4, seed=1000 * rank + number)
        optimizer.zero_grad()
        loss_of(called(inputs), targets).backward()
        optimizer.step()
    return values(wrapped)


def assert_trained_like_the_eager_model(model, wrap, way) -> None:
    build, draw = MODELS[model]

    def run(backend: Backend):
        wrapped, called = way(build, wrap, backend)
        return train(wrapped, called, backend.rank, draw)

    def eager(backend: Backend):
        wrapped = wrap(build(), backend)
        return train(wrapped, wrapped, backend.rank, draw)

    found, expected = simulate(run, RANKS), simulate(eager, RANKS)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.checkered
@every_way
@pytest.mark.parametrize("model", MODELS)
def test_compiled_training_is_that_of_the_eager_model(model, way):
    assert_trained_like_the_eager_model(model, DDP, way)


@pytest.mark.parametrize("wrap", OTHERS.values(), ids=OTHERS)
def test_so_it_is_with_other_options_and_wrappers(wrap):
    assert_trained_like_the_eager_model("linear", wrap, compiled_outside)


@pytest.mark.parametrize("way", [compiled_outside, compiled_in_place], ids=lambda way: way.__name__)
def test_a_model_is_one_graph_which_is_compiled_once(way):
    """What DDP counts from pass to pass is not compiled, nor guarded."""

    def run(backend: Backend) -> None:
        wrapped, called = way(lambda: seeded(DefinedBackwards), DDP, backend)
        train(wrapped, called, backend.rank, steps=12)

    simulate(run, 1)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["frames"]["total"] <= 3


def test_no_sync_weights_and_join_of_a_compiled_ddp():
    def run(backend: Backend):
        ddp, called = compiled_outside(lambda: seeded(DefinedBackwards), DDP, backend)
        with ddp.no_sync():
            called(noise(4, 6, seed=backend.rank)).square().mean().backward()
        called(noise(4, 6, seed=10 + backend.rank)).square().mean().backward()
        found = [gradients(ddp)]
        ddp.zero_grad()
        with ddp.join():
            for number in range(backend.rank + 1):
                ddp.zero_grad()
                loss = called(noise(4, 6, seed=20 + number)).square().mean()
                ddp.weighted(loss, 4).backward()
        found.append(gradients(ddp))
        return found

    def alone(*seeds: int):
        model = seeded(DefinedBackwards)
        for seed in seeds:
            model(noise(4, 6, seed=seed)).square().mean().backward()
        return gradients(model)

    for both, last in simulate(run, RANKS):
        assert_close(both, mean_of([alone(0, 10), alone(1, 11)]), rtol=1e-4, atol=1e-6)
        assert_close(last, alone(21), rtol=1e-4, atol=1e-6)


def test_gradients_of_inputs_of_a_compiled_ddp_send_nothing():
    def run(backend: Backend):
        ddp, called = compiled_outside(lambda: seeded(DefinedBackwards), DDP, backend)
        x = noise(4, 6, seed=backend.rank).requires_grad_()
        if backend.rank == 0:
            (slope,) = torch.autograd.grad(called(x).square().mean(), x)
            assert slope.any()
        called(x).square().mean().backward()
        return gradients(ddp)

    assert_same_bits(list(simulate(run, RANKS)))


@every_way
def test_a_copy_of_a_compiled_ddp_has_parameters_of_its_own(way):
    def run(backend: Backend) -> None:
        ddp, called = way(lambda: seeded(DefinedBackwards), DDP, backend)
        x = noise(4, 6)
        before = called(x)
        other = copy.deepcopy(ddp)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.zero_()
        torch.testing.assert_close(other(x), before)

    simulate(run, RANKS)
