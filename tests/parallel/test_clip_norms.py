"""clip_grad_norm_: one norm for a model that ranks share in whatever way, the plain model's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ddp_models import seeded
from ddp_runs import Watched, rows_of
from tensor_models import VOCABULARY, batch, plain_loss
from test_mesh_three_axes import layers, plan
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    LocalSGD,
    MisuseError,
    Pipeline,
    PipelineParallelConfig,
    ReduceOp,
    ShardingStrategy,
    all_reduce_coalesced_,
    clip_grad_norm_,
    parallelize,
    simulate,
)
from phalanx.tensor import parallel_cross_entropy

LIMIT = 0.05
NORMS = [2.0, 1.0, math.inf]


def clipped(model: nn.Module, norm_type: float) -> float:
    """The norm before, of gradients that are found to be scaled by it."""
    before = {p: p.grad.detach().clone() for p in model.parameters() if p.grad is not None}
    total = clip_grad_norm_(model, LIMIT, norm_type=norm_type)
    assert total.dtype is torch.float64
    for parameter, gradient in before.items():
        torch.testing.assert_close(parameter.grad, gradient * min(1, LIMIT / total.item()))
    return total.item()


def assert_all(norms: list[float], expected: Tensor) -> None:
    assert len(set(norms)) == 1, "not the same bits"
    assert norms[0] == pytest.approx(expected.item(), rel=1e-5)


# Nested, on meshes ----------------------------------------------------------------------------


@pytest.mark.checkered
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(
    "sharded",
    [
        lambda mesh, model: FSDP(model, mesh["data"]),
        lambda mesh, model: FSDP(model, mesh["data"], strategy=ShardingStrategy.NO_SHARD),
        lambda mesh, model: DDP(model, mesh["data"]),
        lambda mesh, model: nn.Sequential(*(FSDP(m, mesh["data"]) for m in model)),
        lambda mesh, model: nn.Sequential(  # cut and sharded, cut, sharded, and neither
            FSDP(model[0], mesh["data"]), model[1], FSDP(model[2:4], mesh["data"]), model[4]
        ),
    ],
    ids=["FSDP", "NO_SHARD", "DDP", "FSDP of layers", "FSDP of some"],
)
def test_data_and_tensor(sharded: Callable[[DeviceMesh, nn.Module], nn.Module], norm_type: float):
    plain, (inputs, targets) = layers(), batch(4)
    plain_loss(plain(inputs), targets).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), LIMIT, norm_type)

    def run(backend: Backend) -> float:
        mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
        model = sharded(mesh, parallelize(layers(), mesh["tensor"], plan(1)))
        mine, own = rows_of(inputs, mesh["data"]), rows_of(targets, mesh["data"])
        loss = parallel_cross_entropy(model(mine), mesh["tensor"], own, num_classes=VOCABULARY)
        loss.backward()
        inner = [m for m in model.modules() if isinstance(m, (DDP, FSDP))]
        averaged = {p for m in inner for p in m.parameters()}
        by_hand = [p.grad for p in model.parameters() if p not in averaged]
        all_reduce_coalesced_(by_hand, mesh["data"], ReduceOp.MEAN)
        return clipped(model, norm_type)

    assert_all(list(simulate(run, 4)), expected)


@pytest.mark.parametrize("norm_type", NORMS)
def test_tensor_inside_of_fsdp_inside_of_a_pipeline(norm_type: float):
    """And a stage that has nothing cut, and one message in each group of those that have."""
    plain, (inputs, targets) = nn.Sequential(*layers(), nn.Identity()), batch(8)
    plain_loss(plain(inputs), targets).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), LIMIT, norm_type)

    def run(backend: Backend) -> float:
        mesh = DeviceMesh(backend, (2, 2, 2), ("data", "stage", "tensor"))
        model = parallelize(layers(), mesh["tensor"], plan(None))
        sharded, whole = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
        units = [
            FSDP(m, mesh["data"], strategy=whole if name in ("0", "3") else sharded)
            for name, m in model.named_children()
        ]
        pipeline = Pipeline(units, mesh["stage"], PipelineParallelConfig(2, 2))
        mine, own = rows_of(inputs, mesh["data"]), rows_of(targets, mesh["data"])
        pipeline.train_step(
            mine,
            own,
            lambda y, t: parallel_cross_entropy(y, mesh["tensor"], t, num_classes=VOCABULARY),
        )
        watched = [Watched(mesh[axis]) for axis in mesh.axis_names]
        norm = clipped(pipeline, norm_type)
        assert [len(each.events) for each in watched] == [1, 1, 1]
        return norm

    assert_all(list(simulate(run, 8)), expected)


def test_stages_that_have_other_groups_round_the_sum_alike():
    """2**53 + 1 is 2**53 in float64, so that the order in which 1 and 2 are added is seen."""

    def run(backend: Backend) -> float:
        mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
        plain, beside, first, second = (nn.Linear(1, 1, bias=False) for _ in range(4))
        stages = [FSDP(first, mesh["data"]), second]
        pipeline = Pipeline(stages, mesh["stage"], PipelineParallelConfig(2, 2))
        model = nn.ModuleList([plain, FSDP(beside, mesh["data"]), pipeline])
        for layer, value in ((plain, 2.0**53), (beside, 1.0), (first, 2.0), (second, 0.0)):
            layer.weight.grad = torch.full_like(layer.weight, value)
        return clip_grad_norm_(model, 1.0, norm_type=1).item()

    assert len(set(simulate(run, 4))) == 1


# What counts ----------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("strategy", "messages"),
    [
        (ShardingStrategy.FULL_SHARD, 1),
        (ShardingStrategy.hybrid(2), 1),
        (ShardingStrategy.hybrid(1), 0),
        (ShardingStrategy.NO_SHARD, 0),
    ],
    ids=str,
)
def test_units_in_a_model_that_is_plain_otherwise(strategy: ShardingStrategy, messages: int):
    inputs = torch.arange(12.0).view(4, 3)
    plain = mlp()
    plain(inputs).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)

    def run(backend: Backend) -> float:
        model = mlp()
        model[0] = FSDP(model[0], backend, strategy=strategy)
        model(rows_of(inputs, backend)).square().mean().backward()
        all_reduce_coalesced_([p.grad for p in model[2].parameters()], backend, ReduceOp.MEAN)
        watched = Watched(model[0].other_parts()[0] or backend)
        norm = clipped(model, 2.0)
        assert len(watched.events) == messages
        return norm

    assert_all(list(simulate(run, 4)), expected)


def test_a_module_inside_of_fsdp_has_its_shards_too():
    def run(backend: Backend) -> list[float]:
        fsdp = FSDP(mlp(), backend)
        fsdp(torch.ones(2, 3)).sum().backward()
        models = fsdp, fsdp.module, nn.ModuleList([fsdp])
        return [clip_grad_norm_(model, 100.0).item() for model in models]

    plain = mlp()
    plain(torch.ones(2, 3)).sum().backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for norms in simulate(run, 3):
        assert norms == pytest.approx([expected] * 3)


def test_local_sgd_clips_each_ranks_own_model():
    def run(backend: Backend) -> tuple[float, float]:
        model = LocalSGD(mlp(), backend, every=4)
        model(torch.full((2, 3), backend.rank + 1.0)).sum().backward()
        plainly = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        watched = Watched(backend)
        norm = clipped(model, 2.0)
        assert not watched.events
        return norm, plainly

    found = list(simulate(run, 2))
    assert found[0][0] != pytest.approx(found[1][0])
    assert all(norm == pytest.approx(plainly) for norm, plainly in found)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_shards_of_any_dtype_frozen_or_empty_on_most_ranks(dtype: torch.dtype, norm_type: float):
    def model() -> nn.Sequential:
        made = seeded(lambda: nn.Sequential(*(nn.Linear(n, 1, dtype=dtype) for n in (2, 1))))
        assert isinstance(made, nn.Sequential)
        made[0].bias.requires_grad_(False)
        return made

    def backward(module: nn.Module) -> None:
        module(torch.tensor([[1.0, 2.0]], dtype=dtype)).abs().sum().backward()

    plain = model()
    backward(plain)
    wide = torch.promote_types(dtype, torch.float32)
    gradients = [p.grad.to(wide) for p in plain.parameters() if p.grad is not None]
    expected = nn.utils.get_total_norm(gradients, norm_type)

    def run(backend: Backend) -> float:
        fsdp = FSDP(model(), backend)
        backward(fsdp)
        return clip_grad_norm_(fsdp, LIMIT, norm_type=norm_type).item()

    assert_all(list(simulate(run, 4)), expected)


def test_gradients_that_are_sparse_and_not_coalesced():
    words = seeded(lambda: nn.Embedding(5, 3, sparse=True))
    F.embedding(torch.tensor([1, 1, 2]), words.weight, sparse=True).sum().backward()
    dense = words.weight.grad.to_dense()
    norm = clip_grad_norm_(words, 1.0)
    assert norm.item() == pytest.approx(dense.norm().item())
    torch.testing.assert_close(words.weight.grad.to_dense(), dense / norm.item())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_value_that_is_not_finite_is_seen_on_every_rank(bad: float, norm_type: float):
    def run(backend: Backend) -> None:
        fsdp = FSDP(mlp(), backend)
        fsdp(torch.ones(2, 3)).sum().backward()
        mine = [p.grad for p in fsdp.parameters() if p.grad.numel()]
        if backend.rank == 1:
            mine[0][0] = bad
        before = [g.clone() for g in mine]
        with pytest.raises(RuntimeError, match=f"rank {backend.rank}: clip_grad_norm_: .* {bad}"):
            clip_grad_norm_(fsdp, 1.0, norm_type=norm_type, error_if_nonfinite=True)
        for now, then in zip(mine, before, strict=True):
            assert torch.equal(now.nan_to_num(), then.nan_to_num())
        assert str(clip_grad_norm_(fsdp, 1.0, norm_type=norm_type).item()) == str(bad)

    simulate(run, 3)


# Misuse ---------------------------------------------------------------------------------------


def test_parameters_are_no_model():
    with pytest.raises(TypeError, match="takes the model, which knows who has which part"):
        clip_grad_norm_(mlp().parameters(), 1.0)  # type: ignore[arg-type]


def test_a_stages_layers_are_not_the_pipeline():
    def run(backend: Backend) -> None:
        pipeline = Pipeline(mlp(), backend, PipelineParallelConfig(2, 1))
        pipeline.train_step(torch.ones(2, 3), torch.ones(2, 2), F.mse_loss)
        with pytest.raises(MisuseError, match="give it the pipeline"):
            clip_grad_norm_(pipeline.module, 1.0)

    simulate(run, 2)
