"""The table of docs/combinations.md: made of the cells that were run, and of nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pages
from cells import REFUSED, RIGHT, Verdict
from feature import Feature
from features import FEATURES, SECTIONS
from wrappers import WAYS, Way

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
Results = Mapping[str, Mapping[tuple[Way, tuple[Feature, ...]], Verdict]]


def table(results: Results) -> str:
    """One table a section, and below them what was refused, and why there is nothing to ask."""
    notes: dict[str, int] = {}
    lines: list[str] = []
    for section in SECTIONS:
        lines += ["", f"### {section.capitalize()}", "", *_section(section, results, notes)]
    lines += ["", "### Notes", ""]
    lines += [f"{number}. {text}" for text, number in notes.items()]
    return "\n".join(lines)


def _section(section: str, results: Results, notes: dict[str, int]) -> Iterator[str]:
    yield f"| | {' | '.join(way.name for way in WAYS)} |"
    yield "|---" * (len(WAYS) + 1) + "|"
    for one in FEATURES:
        if one.section == section:
            cells = [_cell(way, one, results, notes) for way in WAYS]
            yield f"| {one.name} | {' | '.join(cells)} |"


def _cell(way: Way, one: Feature, results: Results, notes: dict[str, int]) -> str:
    """`right`, a number of a note, or `?` if it was not run everywhere."""
    if why := one.lacks(way):
        return f"- ({notes.setdefault(f'nothing to ask: {why}', len(notes) + 1)})"
    found = [verdicts.get((way, (one,))) for verdicts in results.values()]
    if any(verdict is None for verdict in found) or not found:
        return "?"
    if all(verdict is not None and verdict.status == RIGHT for verdict in found):
        return "right"
    if all(verdict is not None and verdict.status == REFUSED for verdict in found):
        words = found[0].words if found[0] is not None else ""
        said = re.sub(r"\s+", " ", words)[:200].replace("|", "/")
        return f"refused ({notes.setdefault(f'refused: {said}', len(notes) + 1)})"
    return "wrong"


def write_page(results: Results) -> None:
    """Put the table into the page, between its marks."""
    pages.rewrite(PAGE, "the table", table(results))
