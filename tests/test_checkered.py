"""Of a test's combinations some stay, and so does every value; of three parameters, every pair."""

from __future__ import annotations

import itertools

import pytest
from checkered import chosen, split

pytest_plugins = ["pytester"]

SOURCE = """
import pytest

@pytest.mark.checkered
@pytest.mark.parametrize("kind", ["a", "b", "c"])
@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 0), (2, 1)])
def test_two(kind, size, root): ...

@pytest.mark.checkered
@pytest.mark.parametrize("x", [0, 1])
@pytest.mark.parametrize("y", [0, 1, 2])
@pytest.mark.parametrize("z", [0, 1])
def test_three(x, y, z): ...

@pytest.mark.parametrize("kind", ["a", "b", "c"])
def test_all(kind): ...
"""


def values(items: list[pytest.Item], test: str) -> list[tuple[object, ...]]:
    chosen = [item.callspec.params for item in items if item.name.startswith(f"{test}[")]
    return [tuple(params.values()) for params in chosen]


@pytest.fixture
def items(pytester: pytest.Pytester) -> list[pytest.Item]:
    pytester.makeini("[pytest]\nmarkers =\n    checkered: half of them\n")
    found, _ = pytester.inline_genitems(pytester.makepyfile(SOURCE))
    return found


def test_half_of_them_stay_with_every_value_and_every_pair_of_three(
    items: list[pytest.Item],
) -> None:
    kept, left = split(items)
    assert sorted(kept + left, key=items.index) == items
    assert len(values(kept, "test_two")) == 5
    assert {value for row in values(kept, "test_two") for value in row} == {"a", "b", "c", 0, 1, 2}
    three = values(kept, "test_three")
    assert len(three) == 6
    for first, second in itertools.combinations(range(3), 2):
        every = {(row[first], row[second]) for row in values(items, "test_three")}
        assert {(row[first], row[second]) for row in three} == every
    assert values(kept, "test_all") == values(items, "test_all")


@pytest.mark.parametrize(
    ("sizes", "stay"),
    [((3, 4, 5), 20), ((2, 2, 5, 3), 15), ((4, 4, 4, 4), 16), ((2, 6, 11), 66), ((1, 3, 4), 12)],
    ids=str,
)
def test_of_more_parameters_as_few_stay_as_have_every_pair(
    sizes: tuple[int, ...], stay: int
) -> None:
    """As many as the two parameters with most values have."""
    rows = list(itertools.product(*map(range, sizes)))
    kept = [rows[number] for number in sorted(chosen(rows))]
    assert len(kept) == stay
    for columns in itertools.combinations(range(len(sizes)), 2):
        pairs = {tuple(row[column] for column in columns) for row in kept}
        assert len(pairs) == sizes[columns[0]] * sizes[columns[1]]


def test_pairs_that_a_test_does_not_have_are_not_asked_for() -> None:
    rows = [row for row in itertools.product(range(3), repeat=3) if row[0] <= row[1]]
    kept = [rows[number] for number in chosen(rows)]
    for first, second in itertools.combinations(range(3), 2):
        there = {(row[first], row[second]) for row in rows}
        assert {(row[first], row[second]) for row in kept} == there


def test_who_asks_for_one_by_its_name_gets_it(items: list[pytest.Item]) -> None:
    for item in items:
        assert split([item]) == ([item], [])


def test_a_board_of_one_row_stays_whole(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    checkered: half of them\n")
    source = """
    import pytest

    @pytest.mark.checkered
    @pytest.mark.parametrize("kind", ["a", "b"])
    def test_one(kind): ...
    """
    found, _ = pytester.inline_genitems(pytester.makepyfile(source))
    assert split(found) == (found, [])
