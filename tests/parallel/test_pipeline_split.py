"""Which layers are a stage."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx import balance_stages, split_into_stages
from phalanx.pipeline import PipelineStage, measure_layer_costs

COSTS = st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1e6)), min_size=1, max_size=9)
SIZES = st.integers(1, 60)


def covers(stages: list[PipelineStage], num_layers: int) -> bool:
    """Whether the stages are all layers, one after the other, and none is empty."""
    ends = [0, *(stage.end_layer for stage in stages)]
    return (
        [stage.start_layer for stage in stages] == ends[:-1]
        and ends[-1] == num_layers
        and all(stage.end_layer > stage.start_layer for stage in stages)
        and [stage.rank for stage in stages] == list(range(len(stages)))
    )


def test_the_larger_stages_come_first() -> None:
    assert split_into_stages(7, 3) == [
        PipelineStage(start_layer=0, end_layer=3, rank=0),
        PipelineStage(start_layer=3, end_layer=5, rank=1),
        PipelineStage(start_layer=5, end_layer=7, rank=2),
    ]


@given(num_layers=SIZES, num_stages=SIZES)
def test_stages_are_all_layers_in_order_and_differ_by_at_most_one(
    num_layers: int, num_stages: int
) -> None:
    if num_stages > num_layers:
        with pytest.raises(ValueError, match=f"{num_layers} layers cannot be {num_stages} stages"):
            split_into_stages(num_layers, num_stages)
        return
    stages = split_into_stages(num_layers, num_stages)
    sizes = [stage.end_layer - stage.start_layer for stage in stages]
    assert covers(stages, num_layers)
    assert len(stages) == num_stages
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 0), (4, -1), (0, 0), (0, 1), (2, 3)])
def test_no_stages_or_more_than_layers_is_an_error(num_layers: int, num_stages: int) -> None:
    with pytest.raises(ValueError):
        split_into_stages(num_layers, num_stages)
    with pytest.raises(ValueError):
        balance_stages([1.0] * num_layers, num_stages)


@given(costs=COSTS, data=st.data())
def test_no_other_split_has_a_cheaper_largest_stage(
    costs: list[float], data: st.DataObject
) -> None:
    n = len(costs)
    num_stages = data.draw(st.integers(1, n))
    stages = balance_stages(costs, num_stages)
    assert covers(stages, n)
    assert len(stages) == num_stages

    def largest(ends: tuple[int, ...]) -> float:
        cuts = (0, *ends, n)
        return max(sum(costs[a:b]) for a, b in pairwise(cuts))

    found = largest(tuple(stage.end_layer for stage in stages[:-1]))
    best = min(largest(ends) for ends in combinations(range(1, n), num_stages - 1))
    assert found == pytest.approx(best)


@given(num_layers=SIZES, num_stages=SIZES, cost=st.sampled_from([0, 1, 0.1, 1e-300, 3e300]))
def test_layers_of_equal_cost_are_split_evenly(
    num_layers: int, num_stages: int, cost: float
) -> None:
    if num_stages > num_layers or cost == 0:
        return
    assert balance_stages([cost] * num_layers, num_stages) == split_into_stages(
        num_layers, num_stages
    )


def test_an_expensive_layer_gets_a_stage_of_its_own() -> None:
    assert [stage[:2] for stage in balance_stages([1, 1, 9, 1, 1, 1], 3)] == [
        (0, 2),
        (2, 3),
        (3, 6),
    ]


def test_layers_that_cost_nothing_are_spread_without_an_empty_stage() -> None:
    assert covers(balance_stages([0, 0, 0, 0], 4), 4)
    assert covers(balance_stages([5, 0, 0], 3), 3)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_cannot_be_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match="the cost of layer 2 is"):
        balance_stages([1.0, 2.0, bad, 1.0], 2)


def test_five_hundred_layers_are_balanced_at_once() -> None:
    costs = torch.rand(500, generator=torch.Generator().manual_seed(0)).tolist()
    stages = balance_stages(costs, 16)
    each = [sum(costs[stage.start_layer : stage.end_layer]) for stage in stages]
    assert max(each) < sum(costs) / 16 + 1


def test_measuring_layers_changes_nothing_of_them_and_finds_the_expensive_one() -> None:
    layers = nn.Sequential(
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(8, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 8)),
        nn.Dropout(),
    )
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    state = torch.get_rng_state()
    costs = measure_layer_costs(layers, torch.randn(32, 8, generator=torch.Generator()))
    assert len(costs) == 5
    assert min(costs) > 0
    assert max(costs) == costs[3]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in layers.parameters())
    for name, value in layers.state_dict().items():
        assert torch.equal(value, before[name]), name
