"""A compressor's state on many ranks: saved, joined, loaded by any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch
from aggregator_kinds import COMPRESSORS, gradients
from torch import Tensor

from phalanx import Backend, CompressedAggregator, ErrorFeedback, TopK, simulate
from phalanx.compression.residuals import short_of

WITH_FEEDBACK = [name for name in COMPRESSORS if "feedback" in name]


def train(backend: Backend, name: str, steps: range, state: Mapping[str, Tensor] | None):
    aggregator = CompressedAggregator(backend, COMPRESSORS[name]())
    if state is not None:
        aggregator.load_state_dict(state)
    found = [aggregator.aggregate(gradients(backend.rank, step)) for step in steps]
    return found, aggregator.state_dict()


def missing(joined: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    prefixes = [f"compression@{rank}/{size}." for rank in range(size)]
    states = [
        {key[len(prefix) :]: value for key, value in joined.items() if key.startswith(prefix)}
        for prefix in prefixes
    ]
    return short_of(states, size)


def join(states) -> dict[str, Tensor]:
    return {key: value for _, state in states for key, value in state.items()}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_training_goes_on_bit_for_bit_from_each_rank_s_own_state(name: str):
    whole = simulate(lambda b: train(b, name, range(4), None)[0], 3)
    half = simulate(lambda b: train(b, name, range(2), None), 3)
    rest = simulate(lambda b: train(b, name, range(2, 4), half[b.rank][1])[0], 3)
    for rank in range(3):
        for step in range(2):
            for one, other in zip(whole[rank][2 + step], rest[rank][step], strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize(("p", "q"), [(4, 2), (2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_another_number_of_ranks_lacks_as_much_and_goes_on(name: str, p: int, q: int):
    saved = join(simulate(lambda b: train(b, name, range(3), None), p))
    loaded = join(simulate(lambda b: train(b, name, range(0), saved), q))
    before, after = missing(saved, p), missing(loaded, q)
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=2**-24, atol=0)
    for found, _ in simulate(lambda b: train(b, name, range(3, 5), saved), q):
        assert all(g.isfinite().all() for step in found for g in step)


def test_a_state_that_is_missing_is_lost_with_a_warning_that_names_it(caplog):
    states = [
        state for _, state in simulate(lambda b: train(b, WITH_FEEDBACK[0], range(2), None), 3)
    ]
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        # As when rank 0 alone has saved: it goes on, the others begin anew.
        loaded = simulate(lambda b: train(b, WITH_FEEDBACK[0], range(0), states[0])[1], 3)
    assert loaded[0].keys() == states[0].keys()
    assert not any("residual" in key for key in [*loaded[1], *loaded[2]])
    warnings = sorted(record.getMessage() for record in caplog.records)
    assert len(warnings) == 2
    assert warnings[0].startswith("rank 1: the state dict lacks")
    assert "ranks 1, 2 had left over (of 3 ranks)" in warnings[0]


def test_states_of_two_saves_are_not_mixed():
    def run(backend: Backend) -> None:
        aggregator = CompressedAggregator(backend, ErrorFeedback(TopK(0.1)))
        mixed = {
            "compression@0/1.residual.0": torch.zeros(2),
            "compression@0/2.residual.0": torch.zeros(2),
        }
        with pytest.raises(ValueError, match=r"of \[1, 2\] ranks"):
            aggregator.load_state_dict(mixed)

    simulate(run, 1)


def test_a_dict_without_any_state_changes_nothing():
    def run(backend: Backend) -> None:
        aggregator = CompressedAggregator(backend, ErrorFeedback(TopK(0)))
        aggregator.aggregate([torch.ones(3)])
        before = aggregator.state_dict()
        aggregator.load_state_dict({"layer.weight": torch.ones(3)})
        assert aggregator.state_dict().keys() == before.keys()

    simulate(run, 1)
