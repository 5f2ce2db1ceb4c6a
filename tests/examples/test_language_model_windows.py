from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from language_model.text import InputError
from language_model.windows import Sampler, Windows, split_text

SEEDS = st.integers(0, 2**32 - 1)
SMALL = st.integers(1, 6)


def all_numbers(windows: int, batch_size: int, world_size: int, seed: int, epoch: int) -> list[int]:
    ranks = [Sampler(windows, batch_size, rank, world_size, seed) for rank in range(world_size)]
    steps = ranks[0].steps_per_epoch
    return [
        number
        for step in range(epoch * steps, (epoch + 1) * steps)
        for rank in ranks
        for number in rank.numbers(step).tolist()
    ]


@given(windows=st.integers(1, 200), batch=SMALL, ranks=SMALL, seed=SEEDS, epoch=st.integers(0, 3))
def test_no_window_comes_twice_in_an_epoch_and_less_than_a_step_is_left_out(
    windows: int, batch: int, ranks: int, seed: int, epoch: int
) -> None:
    numbers = all_numbers(windows, batch, ranks, seed, epoch)
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(range(windows))
    assert 0 <= windows - len(numbers) < batch * ranks


@given(windows=st.integers(12, 200), seed=SEEDS, step=st.integers(0, 50))
def test_a_step_of_all_ranks_depends_only_on_batch_size_times_ranks(
    windows: int, seed: int, step: int
) -> None:
    def of_all_ranks(batch_size: int, world_size: int) -> list[int]:
        ranks = [Sampler(windows, batch_size, rank, world_size, seed) for rank in range(world_size)]
        return torch.cat([rank.numbers(step) for rank in ranks]).tolist()

    assert of_all_ranks(12, 1) == of_all_ranks(6, 2) == of_all_ranks(4, 3) == of_all_ranks(1, 12)


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    orders = [all_numbers(100, 5, 2, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == len(orders)


def bytes_of(windows: Windows) -> set[int]:
    return {
        place
        for start in windows.starts.tolist()
        for place in range(start, start + windows.context + 1)
    }


@given(size=st.integers(1, 3000), context=st.integers(1, 40))
def test_held_out_bytes_are_never_trained_on(size: int, context: int) -> None:
    try:
        training, held_out = split_text(bytes(size), context)
    except InputError:
        assert size // 50 <= context
        return
    assert len(training) == 9 * len(held_out) > 0
    assert bytes_of(training).isdisjoint(bytes_of(held_out))
    assert bytes_of(training) | bytes_of(held_out) <= set(range(size))


def test_targets_are_the_bytes_that_follow_the_inputs() -> None:
    content = bytes(range(256)) * 4
    training, _ = split_text(content, 4)
    inputs, targets = training.take(torch.arange(len(training)))
    assert inputs.shape == targets.shape == (len(training), 4)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 256, targets)


def test_too_few_windows_for_a_step_is_said() -> None:
    with pytest.raises(InputError, match=r"7 windows .* 4 on each of 2 ranks"):
        Sampler(7, 4, 0, 2, 0).check()
