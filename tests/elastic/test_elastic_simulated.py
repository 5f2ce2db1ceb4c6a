"""Elastic training in simulated processes: a crash at any turn, pairs of them, arrivals.

The state is compared with the oracle's, bit for bit: checkpoints that were saved and loaded.
"""

from __future__ import annotations

import pytest
from elastic_script import STEPS, WAYS, train
from forms import LONG, examples
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", WAYS)
def test_the_end_is_that_of_checkpoints_wherever_a_process_crashes(name: str) -> None:
    run, turns = train(WAYS[name], 3)
    assert [end.counted for end in run.ends.values()] == [list(range(STEPS))] * 3
    first, apart = (0, 1) if LONG else (3 * [*WAYS].index(name), 24)
    for process in range(3):
        for turn in range(first, turns[process], apart):
            run, _ = train(WAYS[name], 3, {process: turn})
            assert run.ends.keys() >= {0, 1, 2} - {process}


def test_the_first_generation_forms_again_wherever_the_last_process_crashes_in_it() -> None:
    """It has written its first version by then, and the others may open its files too late."""
    _, turns = train(WAYS["full_shard"], 3)
    for turn in range(turns[2] // 8, turns[2] // 3):
        run, _ = train(WAYS["full_shard"], 3, {2: turn})
        assert run.ends.keys() == {0, 1}


@pytest.mark.parametrize("name", ["full_shard", "top_k"])
def test_a_second_rank_may_die_while_the_next_generation_forms(name: str) -> None:
    """What the first one had is then in the versions of two generations ago."""
    way = WAYS[name]
    _, turns = train(way, 4)
    first = {1: turns[1] * 2 // 3}
    _, turns = train(way, 4, first)
    for turn in range(turns[2] // 2, turns[2], 1 if LONG else 8):
        run, _ = train(way, 4, {**first, 2: turn})
        assert run.ends.keys() == {0, 3}


@settings(max_examples=examples(60))
@given(
    st.sampled_from(sorted(WAYS)),
    st.dictionaries(st.integers(0, 3), st.integers(0, 140), min_size=2, max_size=3),
    st.lists(st.integers(0, 400), max_size=2),
    st.integers(0, 99),
)
def test_several_crashes_and_arrivals(
    name: str, crashes: dict[int, int], arrivals: list[int], seed: int
) -> None:
    run, _ = train(WAYS[name], 4, crashes, arrivals, seed)
    assert run.ends.keys() >= {0, 1, 2, 3} - crashes.keys()
