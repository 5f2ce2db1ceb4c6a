"""PipelineParallelConfig: what can be, by way of JSON and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import PipelineParallelConfig

CONFIGS = st.one_of(
    st.builds(
        PipelineParallelConfig,
        st.integers(1, 99),
        st.integers(1, 99),
        st.sampled_from(["gpipe", "1f1b", "zb_h1"]),
        st.sampled_from([None, 1]),
    ),
    st.builds(
        PipelineParallelConfig,
        st.integers(1, 99),
        st.integers(1, 99),
        st.just("zb_v"),
        st.sampled_from([None, 2]),
    ),
    st.builds(
        PipelineParallelConfig,
        st.integers(1, 99),
        st.integers(1, 99),
        st.just("interleaved_1f1b"),
        st.one_of(st.none(), st.integers(2, 9)),
    ),
)


@given(config=CONFIGS)
def test_a_configuration_goes_to_json_and_back(config: PipelineParallelConfig) -> None:
    assert PipelineParallelConfig.from_json(config.to_json()) == config
    assert hash(PipelineParallelConfig.from_json(config.to_json().encode())) == hash(config)


def test_1f1b_is_what_nothing_said_means() -> None:
    config = PipelineParallelConfig(4, 8)
    assert (config.schedule, config.chunks) == ("1f1b", 1)
    assert config.to_json() == '{"num_stages":4,"num_micro_batches":8}'
    assert PipelineParallelConfig(4, 8, "interleaved_1f1b").chunks == 2
    assert PipelineParallelConfig(4, 8, "zb_v").chunks == 2


def test_the_bubble_in_theory_is_known_before_anything_runs() -> None:
    assert PipelineParallelConfig(4, 8).bubble == pytest.approx(3 / 11)
    assert PipelineParallelConfig(4, 8, "gpipe").bubble == pytest.approx(3 / 11)
    assert PipelineParallelConfig(4, 8, "interleaved_1f1b", 3).bubble == pytest.approx(3 / 27)
    assert PipelineParallelConfig(4, 8, "zb_h1").bubble == pytest.approx(3 / 27)
    assert PipelineParallelConfig(4, 8, "zb_v").bubble == pytest.approx(3 / 51)
    assert PipelineParallelConfig(1, 1).bubble == 0


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(AttributeError):
        PipelineParallelConfig(4, 8).num_stages = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((0, 8), ValueError, "num_stages has to be 1 or more, not 0"),
        ((4, -1), ValueError, "num_micro_batches has to be 1 or more, not -1"),
        ((4.0, 8), TypeError, "num_stages has to be a whole number, not 4.0"),
        ((4, True), TypeError, "num_micro_batches has to be a whole number, not True"),
        (
            (4, 8, "2f2b"),
            ValueError,
            "no schedule '2f2b'; there are gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_v",
        ),
        ((4, 8, None), ValueError, "no schedule None"),
        ((4, 8, "1f1b", 2), ValueError, "1f1b has 1 chunk on each rank, not 2; interleaved_1f1b"),
        ((4, 8, "zb_v", 3), ValueError, "zb_v has 2 chunks on each rank, not 3; interleaved_1f1b"),
        ((4, 8, "interleaved_1f1b", 1), ValueError, "needs 2 chunks or more"),
        ((4, 8, "interleaved_1f1b", 0), ValueError, "num_chunks has to be 1 or more, not 0"),
        ((2**20, 2**20), ValueError, "may be 536,870,912 at most"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        PipelineParallelConfig(*arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"num_stages": 4}', "missing required field `num_micro_batches`"),
        ('{"num_stages": 0, "num_micro_batches": 1}', "num_stages has to be 1 or more"),
        ('{"num_stages": "4", "num_micro_batches": 1}', "Expected `int`, got `str`"),
        ('{"num_stages": 4, "num_micro_batches": 1, "stages": 3}', "unknown field `stages`"),
        ("four stages", "malformed"),
    ],
)
def test_json_that_is_no_configuration_is_a_value_error_that_says_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PipelineParallelConfig.from_json(text)
