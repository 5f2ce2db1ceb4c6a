"""`aggregate(gradients, weight=)`: of sums of losses, the gradient of the joined batch."""

from __future__ import annotations

import math

import pytest
import torch
from aggregator_kinds import ALL, ALONE, EXACT, gradients
from clusters import Cluster
from forms import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx import (
    Backend,
    CompressedAggregator,
    DesyncError,
    ErrorFeedback,
    LocalAggregator,
    ParameterServer,
    Quantized,
    TopK,
    simulate,
)
from phalanx.compression.error_feedback import total_residual

NEAR = {"rtol": 1e-12, "atol": 1e-14}
SERVERS = ["all-reduce", "parameter server", "top-k of all"]


def joined(weights: list[float], step: int = 0) -> list[Tensor]:
    """(sum of the ranks' gradients) / (sum of their weights); those of weight 0 are zeros."""
    per_rank = [
        gradients(rank, step, torch.float64) for rank, weight in enumerate(weights) if weight
    ]
    return [sum(one) / sum(weights) for one in zip(*per_rank, strict=True)]


def of_rank(backend: Backend, weights: list[float], step: int = 0) -> list[Tensor]:
    """Its gradients; NaN if their weight is 0."""
    rank = backend.rank
    own = gradients(rank, step, torch.float64)
    return own if weights[rank] else [torch.full_like(each, math.nan) for each in own]


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(sorted(EXACT)),
    weights=st.lists(
        st.one_of(st.just(0.0), st.integers(1, 9), st.floats(0.01, 1e4)), min_size=1, max_size=5
    ),
)
def test_the_average_is_the_gradient_of_the_joined_batch(name: str, weights: list[float]):
    assume(any(weights))

    def run(backend: Backend):
        own = of_rank(backend, weights)
        found = EXACT[name](backend).aggregate(own, weight=weights[backend.rank])
        for one, other in zip(own, of_rank(backend, weights), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)  # not changed
        return found

    for found in simulate(run, len(weights)):
        torch.testing.assert_close(found, joined(weights), **NEAR)


@pytest.mark.checkered
@pytest.mark.parametrize("name", SERVERS)
def test_it_is_so_on_every_kind_of_backend(name: str, cluster: Cluster):
    weights = [3, 0, 0.5]

    def run(backend: Backend):
        own = of_rank(backend, weights)
        return EXACT[name](backend).aggregate(own, weight=torch.tensor(weights[backend.rank]))

    for found in cluster.run(run, 3):
        torch.testing.assert_close(found, joined(weights), **NEAR)


def test_one_rank_alone_divides_by_its_weight():
    own = gradients(0, 0, torch.float64)
    found = LocalAggregator().aggregate(own, weight=4)
    torch.testing.assert_close(found, [each / 4 for each in own], **NEAR)
    with pytest.raises(ValueError, match="all weights are 0"):
        LocalAggregator().aggregate(own, weight=0)


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: Quantized(4, block=8)])
def test_what_is_sent_and_what_is_left_are_the_weighted_gradient(make):
    """In every call, with the residuals of ranks that have weight 0 in it, too."""
    weights = [[1, 3, 2], [0, 5, 0], [2, 0, 0], [1, 1, 1]]

    def run(backend: Backend):
        aggregator = CompressedAggregator(backend, ErrorFeedback(make()))
        story = []
        for step, row in enumerate(weights):
            own = of_rank(backend, row, step)
            sent = aggregator.aggregate(own, weight=row[backend.rank])
            story.append((sent, aggregator.compressor.state_dict()))
        return story

    stories = simulate(run, 3)
    lacked = [torch.zeros(each.numel()).double() for each in joined(weights[0])]
    for step, row in enumerate(weights):
        sent = stories[0][step][0]
        left = total_residual([story[step][1] for story in stories], 3)
        now = [left[str(number)].flatten() for number in range(len(lacked))]
        for number, expected in enumerate(joined(row, step)):
            torch.testing.assert_close(
                sent[number].flatten() + now[number], expected.flatten() + lacked[number], **NEAR
            )
        lacked = now


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "many"])
@pytest.mark.parametrize("name", SERVERS)
def test_a_bad_weight_of_one_rank_is_an_error_on_every_rank(name: str, weight: object):
    def run(backend: Backend):
        aggregator = ALL[name](backend)
        bad = backend.rank == 1
        with pytest.raises(
            ValueError, match="weight|could not convert" if bad else "rank 1 cannot"
        ):
            aggregator.aggregate(gradients(backend.rank), weight=weight if bad else 2)
        return aggregator.aggregate(gradients(0), weight=1)  # nothing was sent: it goes on

    simulate(run, 3)


@pytest.mark.parametrize("name", SERVERS)
def test_weights_of_0_on_all_ranks_are_an_error_on_every_rank(name: str):
    def run(backend: Backend):
        with pytest.raises(ValueError, match=f"rank {backend.rank}: .*all weights are 0"):
            ALL[name](backend).aggregate(gradients(backend.rank), weight=0)

    simulate(run, 3)


@pytest.mark.parametrize("name", SERVERS)
def test_a_weight_on_some_ranks_only_is_refused_on_every_rank(name: str):
    def run(backend: Backend):
        with pytest.raises(DesyncError, match=r"do different things: rank 1 has called .* weight"):
            ALL[name](backend).aggregate(gradients(0), weight=1 if backend.rank == 1 else None)

    simulate(run, 3)


@pytest.mark.parametrize("name", ALONE)
def test_a_weight_of_1_on_each_rank_is_the_mean_to_the_last_bit(name: str):
    def run(backend: Backend):
        plain = ALONE[name](backend).aggregate(gradients(backend.rank))
        weighted = ALONE[name](backend).aggregate(gradients(backend.rank), weight=1)
        assert all(map(torch.equal, plain, weighted))

    simulate(run, 3)


def test_the_server_has_it_under_its_own_name_too():
    def run(backend: Backend):
        server = ParameterServer(backend)
        return server.reduce_gradients(of_rank(backend, [1, 2]), weight=[1, 2][backend.rank])

    for found in simulate(run, 2):
        torch.testing.assert_close(found, joined([1, 2]), **NEAR)
