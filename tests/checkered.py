"""Some of the combinations of a test's parameters, such that no value of any is left out.

    @pytest.mark.checkered                  1 2 3 4  of the one, a b c of the other
    @pytest.mark.parametrize(...)        a  x . x .
    @pytest.mark.parametrize(...)        b  . x . x
                                         c  x . x .

Of two parameters every second combination stays. Of three or more, as few as have every pair of
values, which is a third to a tenth of them: what goes wrong with a value, or with two that meet, is
found as before (Cohen et al. 1997, "The AETG System": most faults need no more than that).

The long form takes all (`forms`). The kind of cluster counts as a parameter like any other. Where
only one parameter has several values, all stay: under mpirun there is one kind of cluster. So they
do where only two of three have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

MARKER = "checkered"
Item = pytest.Item
Row = tuple[int, ...]  # of an item: of each parameter, the number of its value


def split(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Those that stay, in their order, and those that the short form leaves out."""
    boards: dict[str, list[Item]] = {}
    for item in items:
        if item.get_closest_marker(MARKER) is not None:
            boards.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[Item] = set()
    for board in boards.values():
        stay = chosen(_rows(board))
        left.update(item for number, item in enumerate(board) if number not in stay)
    return [i for i in items if i not in left], [i for i in items if i in left]


def chosen(rows: Sequence[Row]) -> set[int]:
    """The numbers of the rows that stay; the same for the same rows."""
    several = sum(len(set(values)) > 1 for values in zip(*rows, strict=True))
    if several < 2:
        return set(range(len(rows)))
    if len(rows[0]) == 2:
        return {number for number, row in enumerate(rows) if sum(row) % 2 == 0}
    return _covering(rows)


def _covering(rows: Sequence[Row]) -> set[int]:
    """Rows with every pair of values: each time the first of those with most pairs that lack."""
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
    lacking = set[object]().union(*pairs)
    stay = set()
    while lacking:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & lacking))
        lacking -= pairs[best]
        stay.add(best)
    return stay


def _rows(board: Sequence[Item]) -> list[Row]:
    """Values are numbered as they come; who asks for one item by its name gets it."""
    columns = []
    for names in _parameters(board[0]):
        seen: dict[Row, int] = {}
        values = [tuple(id(i.callspec.params[name]) for name in names) for i in board]  # type: ignore[attr-defined]
        columns.append([seen.setdefault(value, len(seen)) for value in values])
    return list(zip(*columns, strict=True))


def _parameters(item: Item) -> list[list[str]]:
    """Names of arguments: those that one decorator gives values to are one parameter."""
    names = list(item.callspec.params)  # type: ignore[attr-defined]
    found = []
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0]
        found.append(given.replace(",", " ").split() if isinstance(given, str) else list(given))
    others = set(names) - {name for some in found for name in some}
    return [*found, *([name] for name in names if name in others)]
