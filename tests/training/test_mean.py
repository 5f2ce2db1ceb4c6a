"""`mean`: of all ranks' values together, each counted once."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import mean, simulate

numbers = st.floats(-1e3, 1e3, allow_nan=False)
pairs = st.lists(st.tuples(numbers, st.sampled_from([0.0, 0.5, 1.0, 7.0])), max_size=5)


def means(values: Sequence[Any], weights: Sequence[Any] | None = None) -> list[float]:
    """The mean that each rank is given, of its values and weights."""

    def run(backend: Any) -> float:
        mine = weights[backend.rank] if weights is not None else None
        return mean(values[backend.rank], backend, weights=mine)

    return list(simulate(run, len(values)))


@given(
    st.lists(pairs, min_size=1, max_size=5).filter(lambda all_: any(w for r in all_ for _, w in r))
)
def test_it_is_the_mean_of_the_joined_values(ranks: list[list[tuple[float, float]]]) -> None:
    found = means(
        [[v for v, _ in rank] for rank in ranks], [[w for _, w in rank] for rank in ranks]
    )
    joined = torch.tensor([pair for rank in ranks for pair in rank], dtype=torch.float64)
    expected = (joined[:, 0] * joined[:, 1]).sum() / joined[:, 1].sum()
    assert found == pytest.approx([float(expected)] * len(ranks), abs=1e-9)
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 3.0],
        [[1.0], [3.0]],
        [torch.tensor([True, True]), torch.full((2, 1), 3, dtype=torch.int64)],
        [
            torch.tensor([1.0, 1.0], requires_grad=True),
            torch.tensor(3.0, dtype=torch.bfloat16).expand(2),
        ],
    ],
    ids=["numbers", "lists", "bools and integers", "gradients and bf16"],
)
def test_values_may_be_numbers_lists_and_tensors_of_any_dtype(values: Sequence[Any]) -> None:
    assert means(values) == [2.0, 2.0]


def test_a_rank_may_have_nothing() -> None:
    assert means([[], [1.0, 2.0, 6.0]]) == [3.0, 3.0]


def test_values_are_added_in_double_precision() -> None:
    tenths = torch.full((1 << 20,), 0.1)
    assert means([tenths, tenths]) == pytest.approx([float(tenths[0])] * 2, rel=1e-12)


def test_nan_stays_and_is_no_matter_where_its_weight_is_zero() -> None:
    nan = float("nan")
    assert all(isnan(found) for found in means([[nan, 1.0], [2.0]]))
    assert means([[nan, 1.0], [3.0]], [[0.0, 1.0], [1.0]]) == [2.0, 2.0]


@pytest.mark.parametrize("wrong", [[-1.0], [float("nan")], [float("inf")], [1.0, 1.0]])
def test_wrong_weights_of_one_rank_are_an_error_on_every_rank(wrong: list[float]) -> None:
    def run(backend: Any) -> str:
        with pytest.raises(ValueError, match="weights must be finite and not negative") as caught:
            mean([1.0], backend, weights=wrong if backend.rank == 1 else [1.0])
        return str(caught.value)

    first, second = simulate(run, 2)
    assert "rank 0: mean: another rank's weights" in first
    assert "rank 1: mean: this rank's weights" in second


def test_nothing_at_all_has_no_mean() -> None:
    def run(backend: Any) -> str:
        with pytest.raises(ValueError, match="no rank has a value that counts"):
            mean([1.0], backend, weights=0.0)
        return "refused"

    assert list(simulate(run, 2)) == ["refused"] * 2
