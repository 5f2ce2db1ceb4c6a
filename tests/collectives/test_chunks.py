from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.collectives.layout import chunk_ranges
from phalanx.errors import InvalidWorldSizeError

LENGTHS = st.integers(0, 300) | st.integers(0, 2**40)
PARTS = st.integers(1, 70)


@given(LENGTHS, PARTS)
def test_chunks_cover_every_element_exactly_once_and_in_order(total: int, parts: int) -> None:
    ranges = chunk_ranges(total, parts)
    assert len(ranges) == parts
    ends = [0, *(end for _, end in ranges)]
    assert [start for start, _ in ranges] == ends[:-1]
    assert ends[-1] == total


@given(LENGTHS, PARTS)
def test_lengths_differ_by_one_at_most(total: int, parts: int) -> None:
    lengths = [end - start for start, end in chunk_ranges(total, parts)]
    assert {total // parts, -(-total // parts)} == {min(lengths), max(lengths)}


@given(LENGTHS, PARTS)
def test_part_i_is_what_the_formula_says(total: int, parts: int) -> None:
    for i, (start, end) in enumerate(chunk_ranges(total, parts)):
        assert (start, end) == (i * total // parts, (i + 1) * total // parts)


def test_the_examples_of_the_docstring() -> None:
    assert chunk_ranges(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert chunk_ranges(2, 4) == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_nothing_to_cut_gives_empty_parts() -> None:
    assert chunk_ranges(0, 3) == [(0, 0)] * 3


@pytest.mark.parametrize("parts", [0, -1])
def test_no_parts_is_an_error(parts: int) -> None:
    with pytest.raises(InvalidWorldSizeError, match=f"cannot cut into {parts} parts"):
        chunk_ranges(10, parts)


def test_a_negative_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot cut -1 elements"):
        chunk_ranges(-1, 2)
