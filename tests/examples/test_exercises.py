"""The exercises of docs/learn.md: they run, their checks tell right from wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from documents import PAGES, ROOT, blocks

sys.path.insert(0, str(ROOT / "tests" / "scripts"))

from notebooks import Cell, cells_of, printed, run, tidy
from plain import measure, sentences

EXERCISES = sorted((ROOT / "examples" / "exercises").glob("*.ipynb"))
PAGE = PAGES["docs/learn.md"]
LARGEST = 30_000  # bytes of a notebook

each = pytest.mark.parametrize("path", EXERCISES, ids=[path.stem for path in EXERCISES])


def text_of(path: Path) -> str:
    return "\n\n".join(
        "".join(cell["source"]) for cell in cells_of(path) if cell["cell_type"] == "markdown"
    )


def first_code_after(heading: str, path: Path) -> Cell:
    cells = cells_of(path)
    place = next(n for n, c in enumerate(cells) if "".join(c["source"]).startswith(heading))
    return next(cell for cell in cells[place:] if cell["cell_type"] == "code")


def test_there_are_eight() -> None:
    assert [path.name[0] for path in EXERCISES] == list("12345678")


@each
def test_running_an_exercise_prints_what_is_stored_in_it(path: Path) -> None:
    cells = cells_of(path)
    texts = run(cells)
    assert texts == [printed(cell) for cell in cells if cell["cell_type"] == "code"]
    assert path.read_text() == tidy(cells, texts), "run tests/scripts/notebooks.py on it"
    assert path.stat().st_size < LARGEST


@each
def test_a_check_says_what_is_wrong_with_the_start_and_accepts_the_solution(path: Path) -> None:
    start = printed(first_code_after("## Exercise", path)).splitlines()
    solution = printed(first_code_after("## Solution", path)).splitlines()
    assert start[-1].startswith("not right yet: ")
    assert solution[-1] == "right"
    assert not any("not right yet" in line for line in solution)


@each
def test_an_exercise_has_a_picture_a_short_task_a_source_and_two_questions(path: Path) -> None:
    cells, text = cells_of(path), text_of(path)
    first = "".join(cells[0]["source"])
    assert re.match(rf"# {path.name[0]}\. \w.*\n\nYou learn ", first)
    assert blocks("text", first)
    (task,) = re.findall(r"\*\*Task\.\*\* (.*?)\n\n", first, flags=re.DOTALL)
    assert len(sentences(task)) <= 8
    assert re.search(r"^\*\*Sources?\.\*\* .*\d{4}\)?\.", first, flags=re.MULTILINE)
    headings = re.findall(r"^## (.*)", text, flags=re.MULTILINE)
    assert headings == ["Exercise", "Solution", "Go on"]
    assert re.findall(r"^(\d)\. ", text.partition("## Go on")[2], flags=re.MULTILINE) == ["1", "2"]


def test_the_picture_of_the_ring_is_that_of_its_file() -> None:
    (picture,) = blocks("text", text_of(EXERCISES[0]))
    source = (ROOT / "src/phalanx/collectives/schedules/linear.py").read_text()
    lines = [line for line in picture.splitlines() if line.startswith("rank")]
    assert len(lines) == 3
    assert [line for line in lines if f"#     {line}\n" not in source] == []


def test_the_picture_of_gpipe_is_what_the_exercise_prints() -> None:
    (picture,) = blocks("text", text_of(EXERCISES[5]))
    text = printed(first_code_after("## Exercise", EXERCISES[5]))
    assert [line[10:] for line in picture.splitlines()] == text.splitlines()[:-1]


@each
def test_an_exercise_is_plain_english(path: Path) -> None:
    assert measure(re.sub(r"^\*\*Sources?\..*", "", text_of(path), flags=re.M)).faults() == []


@pytest.mark.parametrize("where", [*EXERCISES, "docs/learn.md"], ids=str)
def test_the_files_that_an_exercise_or_the_page_names_are_there(where: Path | str) -> None:
    text = PAGE if isinstance(where, str) else text_of(where)
    names = re.findall(r"`((?:src|examples|docs|tests)/[\w./]+)`", text)
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_page_has_all_exercises_in_their_order() -> None:
    named = re.findall(r"^\| `(examples/exercises/\w+\.ipynb)` \|", PAGE, flags=re.MULTILINE)
    assert [ROOT / name for name in named] == EXERCISES


def test_the_page_names_words_of_the_glossary() -> None:
    rows = re.findall(r"^\| `examples.*\| ([^|]+) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == len(EXERCISES)
    for word in ", ".join(rows).split(", "):
        assert word in PAGES["docs/glossary.md"], word


def test_the_check_that_the_page_shows_is_that_of_the_first_exercise() -> None:
    start, solution = blocks("text", PAGE)
    assert start == printed(first_code_after("## Exercise", EXERCISES[0]))
    assert solution == printed(first_code_after("## Solution", EXERCISES[0]))


READING = re.findall(
    r"^\| \[?(\w+)[^|]*? (\d{4})[^|]*\|[^|]*\| `(src/\S+)` \|$", PAGE, flags=re.MULTILINE
)


def test_a_file_on_the_reading_path_names_the_paper_beside_it() -> None:
    assert len(READING) >= 8
    for author, year, file in READING:
        source = (ROOT / file).read_text()
        assert author in source, (author, file)
        assert year in source, (year, file)
