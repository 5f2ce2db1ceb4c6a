from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from language_model.text import InputError
from language_model.windows import Windows, batches, check_enough, make_sampler, split_text

import phalanx


def starts(windows: int, batch_size: int, backend: phalanx.Backend, steps: int) -> list[list[int]]:
    """The first bytes of this rank's windows, step by step; window n begins with n."""
    text = torch.arange(windows + 2, dtype=torch.uint8)
    of_text = Windows(text, torch.arange(windows), context=1)
    sampler = make_sampler(windows, batch_size, 0, backend)
    return [inputs.flatten().tolist() for inputs, _ in islice(batches(of_text, sampler), steps)]


@given(windows=st.integers(12, 200), step=st.integers(1, 50))
def test_a_step_of_all_ranks_depends_only_on_batch_size_times_ranks(
    windows: int, step: int
) -> None:
    def of_all_ranks(batch_size: int, ranks: int) -> list[int]:
        found = phalanx.simulate(lambda b: starts(windows, batch_size, b, step), ranks)
        return [start for steps in found for start in steps[-1]]

    assert of_all_ranks(12, 1) == of_all_ranks(6, 2) == of_all_ranks(4, 3)


def test_in_an_epoch_no_window_comes_twice_and_the_next_one_has_another_order() -> None:
    [steps] = phalanx.simulate(lambda backend: starts(10, 3, backend, 6), 1)
    epochs = [[start for step in part for start in step] for part in (steps[:3], steps[3:])]
    assert [len(set(epoch)) for epoch in epochs] == [9, 9]
    assert epochs[0] != epochs[1]


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
    training, held_out = split_text(bytes(500), 4)
    with pytest.raises(InputError, match=r"windows to train on .* 99 on each of 2 ranks"):
        check_enough(training, held_out, 99, 2)
