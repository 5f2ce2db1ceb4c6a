"""A compressor's state on many ranks: saved, joined, loaded by any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch
from aggregator_kinds import COMPRESSORS, gradients
from torch import Tensor

from phalanx import (
    Backend,
    CompressedAggregator,
    ErrorFeedback,
    Quantized,
    SizeMismatchError,
    TopK,
    simulate,
)
from phalanx.compression.error_feedback import total_residual

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
    return total_residual(states, size)


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


@pytest.mark.checkered
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


DAMAGED = {
    "a number that is none": ({"residual.0": torch.tensor([1.0, torch.nan])}, "no row of finite"),
    "an infinity": ({"residual.0": torch.tensor([torch.inf])}, "no row of finite"),
    "integers": ({"residual.0": torch.ones(2).long()}, "no row of finite"),
    "a matrix": ({"residual.0": torch.ones(2, 3)}, "no row of finite"),
    "no tensor": ({"residual.0": [1.0]}, "is a list, not a tensor"),
    "a slice of nothing": ({"owned.0-2.0": torch.ones(2)}, "no part of a gradient"),
    "a slice of no numbers": ({"owned.x-y.0": torch.ones(2)}, "no part of a gradient"),
    "a slice that is too long": (
        {"residual.0": torch.ones(4), "owned.2-6.0": torch.ones(4)},
        "no part of a gradient",
    ),
    "a slice of another length": (
        {"residual.0": torch.ones(4), "owned.2-4.0": torch.ones(3)},
        "no part of a gradient",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_state_that_is_damaged_is_refused_and_the_one_that_was_there_stays(what: str):
    state, words = DAMAGED[what]

    def run(backend: Backend) -> None:
        aggregator = CompressedAggregator(backend, ErrorFeedback(Quantized(1)))
        aggregator.aggregate([torch.arange(4.0)])
        before = aggregator.state_dict()
        damaged = {f"compression@1/2.{key}": value for key, value in state.items()}
        with pytest.raises(ValueError, match=f"rank 0: .*damaged.* of rank 1's .*{words}"):
            aggregator.load_state_dict(damaged)
        after = aggregator.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)

    simulate(run, 1)


def test_ranks_that_had_other_models_are_refused_by_the_gradient_s_name():
    def run(backend: Backend) -> None:
        aggregator = CompressedAggregator(backend, ErrorFeedback(TopK(0.1)))
        joined = {
            "compression@0/2.residual.0": torch.ones(3),
            "compression@1/2.residual.0": torch.ones(4),
        }
        with pytest.raises(SizeMismatchError, match="4 values that were left over of 0"):
            aggregator.load_state_dict(joined)

    simulate(run, 1)


def test_a_key_of_more_ranks_than_there_can_be_is_nobody_s():
    def run(backend: Backend) -> None:
        aggregator = CompressedAggregator(backend, ErrorFeedback(TopK(0.1)))
        aggregator.load_state_dict({f"compression@0/{10**12}.residual.0": torch.ones(3)})
        assert not aggregator.state_dict()

    simulate(run, 1)


@pytest.mark.checkered
@pytest.mark.parametrize("later", COMPRESSORS)
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_another_compressor_goes_on_from_it_or_says_that_it_forgets(name: str, later: str, caplog):
    def run(backend: Backend) -> tuple[dict[str, Tensor], ...]:
        _, state = train(backend, name, range(2), None)
        _, loaded = train(backend, later, range(0), state)
        train(backend, later, range(2, 3), state)
        return state, loaded

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        states, loaded = zip(*simulate(run, 2), strict=True)
    told = any(
        "ErrorFeedback had left over, and it is lost" in r.getMessage() for r in caplog.records
    )
    assert told == ("feedback" not in later)
    if not told:
        before, after = missing(join(enumerate(states)), 2), missing(join(enumerate(loaded)), 2)
        assert all(torch.equal(before[key], after[key]) for key in before)
