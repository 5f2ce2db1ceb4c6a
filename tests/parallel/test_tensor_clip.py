"""clip_grad_norm_: the norm of the plain model's gradients, found by ranks that have parts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from ddp_runs import Watched, rows_of
from tensor_models import (
    VOCABULARY,
    assert_all_close,
    batch,
    plain_gradients,
    plain_loss,
    plan_for,
    transformer,
    whole_gradients,
)
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    ShardingStrategy,
    clip_grad_norm_,
    parallelize,
    simulate,
)
from phalanx.tensor import parallel_cross_entropy


@pytest.mark.parametrize(
    ("norm_type", "max_norm", "tied"),
    [
        (2.0, 0.1, False),
        (2.0, 0.1, True),
        (2.0, 100.0, False),
        (3, 0.1, False),
        (math.inf, 0.1, True),
    ],
)
def test_gradients_are_clipped_as_the_plain_models(norm_type: float, max_norm: float, tied: bool):
    plain, (inputs, targets) = transformer(tied=tied), batch()
    plain_loss(plain(inputs), targets).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)

    def run(backend: Backend) -> tuple[Tensor, dict[str, Tensor]]:
        model = parallelize(transformer(tied=tied), backend, plan_for())
        logits = model(inputs)
        parallel_cross_entropy(logits, backend, targets, num_classes=VOCABULARY).backward()
        watched = Watched(backend)
        norm = clip_grad_norm_(model, max_norm, norm_type=norm_type)
        assert len(watched.events) == 1
        return norm, whole_gradients(model)

    results = simulate(run, 3)
    assert len({norm.item() for norm, _ in results}) == 1
    for norm, found in results:
        torch.testing.assert_close(norm.float(), expected)
        assert_all_close(found, plain_gradients(plain))


def test_on_a_mesh_it_follows_ddp():
    plain, (inputs, targets) = transformer(), batch(4)
    plain_loss(plain(inputs), targets).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)

    def run(backend: Backend) -> Tensor:
        mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
        model = DDP(parallelize(transformer(), mesh["tensor"], plan_for()), mesh["data"])
        mine, own = rows_of(inputs, mesh["data"]), rows_of(targets, mesh["data"])
        loss = parallel_cross_entropy(model(mine), mesh["tensor"], own, num_classes=VOCABULARY)
        loss.backward()
        return clip_grad_norm_(model, 0.1)

    for norm in simulate(run, 4):
        torch.testing.assert_close(norm.float(), expected)


def test_ranks_may_have_no_gradients_and_models_no_parallel_layers():
    def run(backend: Backend) -> list[float]:
        model = parallelize(transformer(), backend, plan_for())
        plain = nn.Linear(1, 1, bias=False)
        plain.weight.grad = torch.tensor([[5.0]])
        both = nn.ModuleList([copy.deepcopy(plain), model])
        both[0].weight.grad = torch.tensor([[3.0]])
        if backend.rank == 0:
            model.head.bias.grad = torch.full_like(model.head.bias, 4 / 7**0.5)
        return [clip_grad_norm_(m, 1.0).item() for m in (plain, both)] + [
            both[0].weight.grad.item()
        ]

    for found in simulate(run, 2):
        assert found == pytest.approx([5, 5, 0.6])


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_with_shards_gradients_that_are_whole_on_every_rank_count_once(
    strategy: ShardingStrategy, norm_type: float
):
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    inputs = torch.arange(6.0).view(2, 3)
    plain = model()
    plain(inputs).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)

    def run(backend: Backend) -> Tensor:
        some = model()
        some[0] = FSDP(some[0], backend, strategy=strategy)
        some(inputs).sum().backward()
        return clip_grad_norm_(some, 0.1, norm_type=norm_type)

    for norm in simulate(run, 3):
        torch.testing.assert_close(norm.float(), expected)


def test_a_norm_that_is_none_is_refused():
    with pytest.raises(ValueError, match="above 0, or inf"):
        clip_grad_norm_(nn.Linear(1, 1), 1.0, norm_type=0)
