"""torch.compile of models with parallel layers: as the plain model, for batches of any size.

With the backend "aot_eager", which needs no compiler: everything but the code of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ddp_models import noise, seeded
from tensor_models import (
    VOCABULARY,
    assert_all_close,
    batch,
    plain_gradients,
    plain_loss,
    whole_gradients,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from phalanx import Backend, DeviceMesh, Pipeline, PipelineParallelConfig, parallelize, simulate
from phalanx.tensor import parallel_cross_entropy

BACKEND = "aot_eager"
SIZES = [(4, 6), (3, 6)]  # the second one compiles for any size


# The compiler suppresses it, but by the filters of the process, which ranks' threads share.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of_words() -> nn.Sequential:
    layers = [nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, VOCABULARY)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), *layers)


def test_gradients_of_a_compiled_model_and_loss_are_the_plain_models():
    plan = {"0": "embedding", "1": "column", "3": "row", "4": "column"}

    def run(backend: Backend) -> list[dict[str, Tensor]]:
        model = parallelize(seeded(model_of_words), backend, plan)

        def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            logits = model(inputs)
            return parallel_cross_entropy(logits, backend, targets, num_classes=VOCABULARY)

        compiled: Callable[..., Tensor] = torch.compile(loss_of, backend=BACKEND)
        found = []
        for size in SIZES:
            model.zero_grad()
            compiled(*batch(*size)).backward()
            found.append(whole_gradients(model))
        return found

    expected = []
    for size in SIZES:
        plain = seeded(model_of_words)
        inputs, targets = batch(*size)
        plain_loss(plain(inputs), targets).backward()
        expected.append(plain_gradients(plain))
    for found in simulate(run, 2):
        for one, other in zip(found, expected, strict=True):
            assert_all_close(one, other)
    assert counters["stats"]["unique_graphs"] > 0


def layers() -> nn.Sequential:
    block = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)]
    return nn.Sequential(nn.Sequential(*block), nn.Linear(6, 3))


def test_compiled_layers_of_a_pipeline_take_micro_batches_of_several_sizes():
    inputs, targets = noise(7, 6), noise(7, 3, seed=1)  # micro-batches of 4 and 3
    plain = seeded(layers)
    F.mse_loss(plain(inputs), targets).backward()
    models = [seeded(layers) for _ in range(4)]

    def run(backend: Backend) -> dict[str, Tensor] | None:
        mesh = DeviceMesh(backend, (2, 2), ("stage", "tensor"))
        model = models[backend.rank]
        parallelize(model, mesh["tensor"], {"0.0": "column", "0.2": "row"})
        for layer in model[0]:
            layer.compile(backend=BACKEND)
        pipeline = Pipeline(list(model), mesh["stage"], PipelineParallelConfig(2, 2))
        pipeline.train_step(inputs, targets, F.mse_loss)
        return whole_gradients(model[0]) if mesh["stage"].rank == 0 else None

    for found in simulate(run, 4)[:2]:
        assert found is not None
        assert_all_close(found, plain_gradients(plain[0]))
    assert counters["stats"]["unique_graphs"] > 0
