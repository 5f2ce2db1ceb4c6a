"""Of a test's combinations those of one colour stay, and so does every value of a parameter."""

from __future__ import annotations

import itertools

import pytest
from checkered import split

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
