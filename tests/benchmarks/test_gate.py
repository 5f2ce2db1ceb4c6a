"""The gate's arithmetic, verdicts and table; and how main_path counts."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gate
from gate import Outcome, bounds, table_of
from main_path import Entry, count, least, page, way


def outcome(*ratios: float, row: str = "a row") -> Outcome:
    return Outcome(row, [2.0] * len(ratios), [2.0 * ratio for ratio in ratios])


@pytest.mark.parametrize(("count", "rank"), [(5, 1), (7, 1), (8, 2), (20, 6), (30, 11), (60, 24)])
def test_bounds_are_the_values_of_the_binomial_table(count: int, rank: int):
    """Each is beyond the median with at most 5 %, and the next value inside it with more."""
    assert bounds(range(count, 0, -1)) == (rank, count + 1 - rank)
    beyond = [sum(math.comb(count, n) for n in range(k)) / 2**count for k in (rank, rank + 1)]
    assert beyond[0] <= 0.05 < beyond[1]


def test_fewer_than_five_pairs_say_nothing():
    assert bounds([2.0] * 4) == (0.0, math.inf)
    assert outcome(2.0, 2.0, 2.0, 2.0).verdict == "unclear"


def test_a_row_fails_when_the_lower_bound_is_above_its_limit():
    slow, most = outcome(*[1.06] * 20, *[1.0] * 10), outcome(*[1.06] * 19, *[1.0] * 11)
    assert (slow.fails, slow.verdict) == (True, "SLOWER")
    assert (most.fails, most.verdict) == (False, "unclear")
    assert outcome(*[1.05] * 30).verdict == "as fast"
    assert outcome(*[0.9] * 30).verdict == "faster"


@pytest.mark.parametrize("row", gate.SLOWER_ON_PURPOSE)
def test_what_is_slower_on_purpose_has_its_own_limit_and_says_why(row: str):
    limit, why = gate.SLOWER_ON_PURPOSE[row]
    allowed, beyond = (outcome(*[limit + by] * 30, row=row) for by in (-0.1, 0.1))
    assert not allowed.fails
    assert beyond.fails
    assert allowed.verdict == f"as fast; limit {limit:g} on purpose: {why}"


def test_names_of_rows_are_different_and_those_that_may_be_slower_exist():
    names = [row.name for row in gate.rows()]
    assert len(set(names)) == len(names)
    assert gate.SLOWER_ON_PURPOSE.keys() <= set(names)


def test_rows_are_chosen_by_their_names_and_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    table, left_out = gate.chosen(["send_recv 8 B, mpi", "8 B, shm, 2", "import"])
    assert [row.name for row in table] == [
        "all_reduce 8 B, shm, 2 ranks",
        "import phalanx, torch apart",
    ]
    assert left_out == {"send_recv 8 B, mpi, 2 ranks": "mpi4py is not installed"}


def test_the_table_has_every_row_its_figures_and_what_is_left_out(capsys: pytest.CaptureFixture):
    Console(width=150).print(table_of([outcome(*[1.25] * 30)], {"other": "no mpirun"}, "times"))
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if "a row" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["a row", "2,000,000.0", "2,500,000.0", "1.250", "1.250", "1.250", "SLOWER"]
    assert "left out: no mpirun" in shown


WAY = [
    Entry("main", "ddp.py", "forward", 0),
    Entry("main", "reducer.py", "watch", 1),
    Entry("moves bytes", "tcp.py", "read", 0),
    Entry("main", "reducer.py", "came", 0),
    Entry("moves bytes", "tcp.py", "read", 0),
    Entry("main", "ddp.py", "forward", 2),
    Entry("main", "ddp.py", "end", 0),
]


def test_changes_of_file_are_counted_in_each_thread_by_itself():
    assert count(WAY) == (5, 3, 2, 7)
    assert least([WAY, WAY[:3], WAY[:5]]) == WAY[:3]


def test_the_way_has_each_function_where_a_thread_first_comes_into_it():
    assert way(WAY) == [
        "thread main",
        "ddp.py      forward",
        "reducer.py    watch",
        "            came",
        "ddp.py      end",
        "",
        "thread moves bytes",
        "tcp.py      read",
    ]
    assert "| tcp | 5 | 3 | 2 | 7 |" in page({"tcp": WAY})


def test_the_committed_page_has_the_form_that_is_made_now():
    """Its figures are those of the commit that made it: they change with the package."""
    document = (Path(__file__).parents[2] / "docs" / "main-path.md").read_text()
    made = page({"tcp": WAY, "shm": WAY})
    headings = [[line for line in text.splitlines() if "##" in line] for text in (document, made)]
    assert all(one == other for one, other in pairwise(headings))
    assert document.split("\n| tcp")[0] == made.split("\n| tcp")[0]
