"""Half of the combinations of a test's parameters, such that no value of any is left out.

    @pytest.mark.checkered                  1 2 3 4  of the one, a b c of the other
    @pytest.mark.parametrize(...)        a  x . x .
    @pytest.mark.parametrize(...)        b  . x . x
                                         c  x . x .

Of three parameters or more every pair of values is still there, with one half or another of the
rest: what goes wrong with a value, or with two of them that meet, is found as before. The long form
takes all (`forms`). The kind of cluster counts as a parameter like any other. A board of one row
stays whole: under mpirun there is one kind of cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

MARKER = "checkered"
Item = pytest.Item
Squares = list[list[int]]  # for each item: of each parameter, the number of its value


def split(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Those that stay, in their order, and those that the short form leaves out."""
    boards: dict[str, list[Item]] = {}
    for item in items:
        if item.get_closest_marker(MARKER) is not None:
            boards.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[Item] = set()
    for board in boards.values():
        squares = _squares(board)
        if sum(len(set(values)) > 1 for values in zip(*squares, strict=True)) < 2:
            continue
        left.update(i for i, square in zip(board, squares, strict=True) if sum(square) % 2)
    return [i for i in items if i not in left], [i for i in items if i in left]


def _squares(board: Sequence[Item]) -> Squares:
    """Values are numbered as they come; who asks for one item by its name gets it."""
    columns = []
    for names in _parameters(board[0]):
        seen: dict[tuple[int, ...], int] = {}
        values = [tuple(id(i.callspec.params[name]) for name in names) for i in board]  # type: ignore[attr-defined]
        columns.append([seen.setdefault(value, len(seen)) for value in values])
    return [list(square) for square in zip(*columns, strict=True)]


def _parameters(item: Item) -> list[list[str]]:
    """Names of arguments: those that one decorator gives values to are one parameter."""
    names = list(item.callspec.params)  # type: ignore[attr-defined]
    found = []
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0]
        found.append(given.replace(",", " ").split() if isinstance(given, str) else list(given))
    others = set(names) - {name for some in found for name in some}
    return [*found, *([name] for name in names if name in others)]
