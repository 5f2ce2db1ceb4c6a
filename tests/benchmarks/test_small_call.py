"""`benchmarks/small_call.py`: its parts run, and docs/numbers.md shows them."""

from __future__ import annotations

import sys
import timeit
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import small_call

PAGE = Path(__file__).parents[2] / "docs" / "numbers.md"


def names_in(text: str) -> list[str]:
    """The first cells of a table's rows."""
    return [line.rpartition(" | ")[0] for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_page_has_a_row_for_each_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed_once = partial(timeit.repeat, number=1, repeat=1)
    monkeypatch.setattr(timeit, "repeat", lambda part, **_: timed_once(part))
    small_call.main()
    section = PAGE.read_text().partition("### A small call")[2].partition("### ")[0]
    assert names_in(section) == names_in(capsys.readouterr().out)
