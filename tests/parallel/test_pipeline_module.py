"""What a rank holds of the model: its own layers, under the names that they have in the whole."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from ddp_models import seeded
from ddp_runs import outcome_of
from pipeline_runs import (
    SIZE,
    assert_same_training,
    batch,
    deep,
    piped,
    sgd,
    train_piped,
    train_plainly,
)
from torch import nn
from torch.nn import functional as F

from phalanx import (
    Backend,
    DesyncError,
    InvalidWorldSizeError,
    MisuseError,
    Pipeline,
    PipelineParallelConfig,
    UnsupportedOperationError,
    simulate,
)
from phalanx.pipeline import PipelineStage


def refused(size: int, build: Any) -> list[BaseException | None]:
    """The errors of each rank that builds a pipeline; the group has to be whole afterwards."""

    def run(backend: Backend) -> BaseException | None:
        error = outcome_of(lambda: build(backend))
        backend.barrier()
        return error

    return list(simulate(run, size))


def test_names_and_state_of_all_ranks_together_are_the_plain_model_s() -> None:
    def build() -> nn.Sequential:
        names = ["embed", "hidden", "act", "head"]
        layers = [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)]
        return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))

    def run(backend: Backend) -> tuple[list[str], dict[str, Any]]:
        pipeline = piped(backend, seeded(build), 2)
        return [name for name, _ in pipeline.named_parameters()], pipeline.state_dict()

    (first, state), (second, other) = simulate(run, 2)
    assert first == ["embed.weight", "embed.bias", "hidden.weight", "hidden.bias"]
    assert second == ["head.weight", "head.bias"]
    plain = seeded(build).state_dict()
    assert {*state, *other} == plain.keys()
    fresh = build()
    fresh.load_state_dict({**state, **other})
    assert torch.equal(fresh.head.weight, plain["head.weight"])


def test_every_rank_may_load_the_plain_model_s_state() -> None:
    plain = deep(seed=5)

    def run(backend: Backend) -> None:
        pipeline = piped(backend, deep(seed=6))
        pipeline.load_state_dict(plain.state_dict())
        for name, value in pipeline.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name])
        with pytest.raises(RuntimeError, match="Unexpected key"):
            pipeline.load_state_dict({**plain.state_dict(), "12.weight": torch.ones(1)})

    simulate(run, 3)


def test_an_interleaved_rank_holds_a_run_of_layers_for_each_chunk() -> None:
    def run(backend: Backend) -> list[str]:
        pipeline = piped(backend, deep(), 2, "interleaved_1f1b")
        assert pipeline.stages == [
            PipelineStage(start, start + 3, rank)
            for start, rank in zip((0, 3, 6, 9), (0, 1, 0, 1), strict=True)
        ]
        return [name for name, _ in pipeline.module.named_children()]

    assert simulate(run, 2) == [["0", "1", "2", "6", "7", "8"], ["3", "4", "5", "9", "10", "11"]]


def test_what_is_kept_of_the_other_stages_is_nothing() -> None:
    def run(backend: Backend) -> int:
        layers = [nn.Linear(SIZE, SIZE) for _ in range(6)]
        alive = [weakref.ref(layer) for layer in layers]
        pipeline = piped(backend, layers)
        del layers
        assert pipeline.module is not None
        return sum(ref() is not None for ref in alive)

    assert simulate(run, 3) == [2, 2, 2]


def test_layers_of_other_stages_may_be_on_the_meta_device() -> None:
    batches = [batch(8)] * 2

    def run(backend: Backend) -> Any:
        layers = list(deep())
        mine = range(4 * backend.rank, 4 * backend.rank + 4)
        layers = [layer if n in mine else layer.to("meta") for n, layer in enumerate(layers)]
        result = train_piped(piped(backend, layers), sgd, batches)
        assert all(p.is_meta for n, x in enumerate(layers) if n not in mine for p in x.parameters())
        return result

    assert_same_training(simulate(run, 3), train_plainly(deep(), sgd, batches))


def test_own_layers_on_the_meta_device_are_refused_by_name_on_every_rank() -> None:
    def build(backend: Backend) -> None:
        piped(backend, deep().to("meta") if backend.rank == 1 else deep())

    for rank, error in enumerate(refused(3, build)):
        assert isinstance(error, MisuseError)
        said = (
            "rank 1: 4.weight is on the meta device, and this rank trains stage 1 (layers 4 to 7)"
        )
        assert said in str(error)
        assert str(error).startswith(f"rank {rank}")


def test_a_parameter_that_two_ranks_would_share_is_refused_and_one_of_one_rank_is_not() -> None:
    def tied(first: int, second: int) -> nn.Sequential:
        layers = deep()
        layers[second].weight = layers[first].weight
        return layers

    for error in refused(2, lambda backend: piped(backend, tied(0, 10))):
        assert isinstance(error, UnsupportedOperationError)
        assert "0.weight on rank 0 and 10.weight on rank 1 are one parameter" in str(error)
        assert "put both layers on one rank" in str(error)

    def run(backend: Backend, schedule: str, second: int) -> Any:
        return train_piped(piped(backend, tied(0, second), 4, schedule), sgd, [batch(8)] * 2)

    for schedule, second in (("1f1b", 4), ("zb_h1", 4), ("interleaved_1f1b", 6), ("zb_v", 10)):
        plain = train_plainly(tied(0, second), sgd, [batch(8)] * 2)
        per_rank = simulate(lambda b, s=schedule, n=second: run(b, s, n), 2)
        assert_same_training(per_rank, plain)


def test_a_layer_without_parameters_may_come_twice() -> None:
    def build() -> list[nn.Module]:
        act = nn.Tanh()
        return [nn.Linear(SIZE, SIZE), act, nn.Linear(SIZE, SIZE), act]

    plain = seeded(lambda: nn.Sequential(*build()))
    F.mse_loss(plain(batch(8)[0]), batch(8)[1]).backward()

    def run(backend: Backend) -> None:
        pipeline = piped(backend, seeded(lambda: nn.Sequential(*build())))
        pipeline.train_step(*batch(8), F.mse_loss)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)

    simulate(run, 4)


@pytest.mark.parametrize(
    ("build", "kind", "said"),
    [
        (lambda b: piped(b, deep(2)), ValueError, "2 layers cannot be 3 stages"),
        (lambda b: piped(b, []), ValueError, "0 layers cannot be 3 stages"),
        (lambda b: piped(b, nn.Linear(1, 1)), TypeError, "not a Linear: a pipeline runs them one"),
        (lambda b: piped(b, [nn.ReLU(), torch.relu, nn.ReLU()]), TypeError, "layer 1 is a builtin"),
        (lambda b: Pipeline(deep(), b, {"p": 3}), TypeError, "has to be a PipelineParallelConfig"),
        (
            lambda b: Pipeline(deep(), b, PipelineParallelConfig(2, 4)),
            InvalidWorldSizeError,
            "the configuration has 2 stages, the backend 3 ranks",
        ),
        (
            lambda b: piped(b, deep(), stages=[PipelineStage(0, 12, 0)]),
            ValueError,
            "3 stages are needed (ranks x chunks), 1 were given",
        ),
        (
            lambda b: piped(b, deep(), stages=[PipelineStage(0, 4, 0)] * 3),
            ValueError,
            "stage 1 has to begin with layer 4 and have a layer or more, not to be [0, 4)",
        ),
        (
            lambda b: piped(b, deep(), stages=[PipelineStage(n, n + 1, n) for n in range(3)]),
            ValueError,
            "the stages end with layer 3 of 12",
        ),
        (
            lambda b: piped(b, deep(), stages=[(0, 4), (4, 8), (8, 12)]),
            TypeError,
            "have to be a list of PipelineStage(start_layer, end_layer, rank), such as",
        ),
        (lambda b: piped(b, deep(), stages=3), TypeError, "balance_stages gives, not 3"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_on_every_rank(
    build: Any, kind: type[Exception], said: str
) -> None:
    for error in refused(3, build):
        assert isinstance(error, kind), error
        assert said in str(error)


DIFFERENT = {
    "layers": (
        lambda b: piped(b, deep(12 if b.rank != 2 else 10)),
        "rank 2 has num_micro_batches=4",
    ),
    "shapes": (
        lambda b: piped(b, [nn.Linear(SIZE, SIZE + (b.rank == 2)) for _ in range(3)]),
        "rank 2 has layer 0: Linear(weight float32 [7, 6], bias float32 [7])",
    ),
    "micro-batches": (
        lambda b: piped(b, deep(), 4 + (b.rank == 2)),
        "rank 2 has num_micro_batches=5",
    ),
    "schedules": (
        lambda b: piped(b, deep(), 4, "gpipe" if b.rank == 2 else "1f1b"),
        "rank 2 has schedule='gpipe'",
    ),
    "stages": (
        lambda b: piped(
            b,
            deep(3),
            stages=None if b.rank != 2 else [PipelineStage(n, n + 1, n) for n in (0, 1, 2)],
        ),
        None,
    ),
    "cuts": (
        lambda b: piped(
            b,
            deep(4),
            stages=[PipelineStage(0, 1, 0), PipelineStage(1, 2, 1), PipelineStage(2, 4, 2)]
            if b.rank == 2
            else None,
        ),
        "rank 2 has stages [(0, 1), (1, 2), (2, 4)]",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_are_given_different_pipelines_are_told_which_and_in_what(what: str) -> None:
    build, said = DIFFERENT[what]
    for error in refused(3, build):
        if said is None:
            assert error is None, "the same cut, however it was said"
            continue
        assert isinstance(error, DesyncError)
        assert "Pipeline: the ranks differ: rank 2 has " in str(error)
        assert said in str(error)
        assert "Give every rank the same" in str(error)


def test_a_pipeline_cannot_be_called() -> None:
    def run(backend: Backend) -> None:
        with pytest.raises(MisuseError, match="use train_step or evaluate"):
            piped(backend, deep())(batch(2)[0])

    simulate(run, 1)
