"""docs/numbers.md has what its commands find, and README some of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from documents import PAGES

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pages
import write_numbers
from write_numbers import FOLDER, PARTS, Found, Part, page_part, run

PAGE, README = PAGES["docs/numbers.md"], PAGES["README.md"]


def rows(part: str) -> list[str]:
    """Of its tables, without spaces at the ends of cells."""
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [re.sub(r" *\| *", "|", line) for line in lines if not re.fullmatch(r"[-:| ]+", line)]


def bench(*lines: dict[str, object]) -> list[Found]:
    return [Found("", json.dumps({"lines": lines}))]


def line(contender: str, us: float, *, size: int = 8, ranks: int = 2) -> dict[str, object]:
    found = {"operation": "all_reduce", "ranks": ranks, "bytes": size}
    return {**found, "contender": contender, "median_us": us}


# The page ---------------------------------------------------------------------------------------


def test_the_page_has_a_place_for_each_part_and_for_nothing_else() -> None:
    assert sorted(re.findall("<!-- begin: (.*) -->", PAGE)) == sorted(PARTS)
    with_rows = [name for name, part in PARTS.items() if part.readme is not None]
    assert re.findall("<!-- begin: (.*) -->", README) == with_rows


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_its_command_the_day_the_commit_and_a_table(name: str) -> None:
    _, part, _ = pages.split(PAGE, name)
    (shown,) = re.findall(r"```console\n(.*?)\n```", part, re.DOTALL)
    commands = dict.fromkeys(each.replace(f"{FOLDER}/", "") for each in PARTS[name].commands)
    assert shown.splitlines() == [*commands]
    assert re.search(r"^\d{4}-\d\d-\d\d, commit [0-9a-f]{8}; \d+ cores of ", part, re.MULTILINE)
    assert len(rows(part)) > 1


def test_rows_of_readme_are_rows_of_the_page() -> None:
    for name in [name for name, part in PARTS.items() if part.readme is not None]:
        shown = rows(pages.split(README, name)[1])
        assert len(shown) > 3
        assert set(shown) <= set(rows(pages.split(PAGE, name)[1]))


# Its tables -------------------------------------------------------------------------------------


def test_a_collective_has_a_row_for_each_size_and_gloo_s_time_over_ours() -> None:
    found = bench(
        line("shm", 50.0),
        line("shm registered", 25.0),
        line("gloo", 125.0),
        line("socketpair", 1.0),
        line("shm", 1234.0, size=1 << 20),
        line("gloo", 2468.0, size=1 << 20),
        line("gloo", 9.0, ranks=4),
    )
    shown = rows("\n".join(write_numbers.collectives(found)))
    assert shown[0] == "|bytes|shm|shm, registered|Gloo|Gloo / shm|Gloo / shm, registered|"
    assert shown[1:3] == ["|8|50.0|25.0|125|2.5|5.0|", "|1M|1,234||2,468|2.0||"]
    few = rows("\n".join(write_numbers.collectives(found, [8], [2])))
    assert few == shown[:2]


def test_steps_of_both_wrappers_stand_side_by_side() -> None:
    found = bench(
        {"operation": "ddp", "contender": "shm", "median_us": 40e3},
        {"operation": "ddp", "contender": "gloo", "median_us": 60e3},
        {"operation": "fsdp", "contender": "shm", "median_us": 50e3},
        {"operation": "fsdp", "contender": "gloo", "median_us": 200e3},
    )
    shown = rows("\n".join(write_numbers.steps(found)))
    assert "|Phalanx, shm|40|1.5|50|4.0|" in shown
    assert "|Phalanx, tcp|||||" in shown


def test_crossings_have_a_column_for_each_link() -> None:
    timed = {"dense": {"seconds": [4.0]}, "half": {"seconds": [1.0, 2.0, 9.0]}}
    fast = {"dense": {"seconds": [0.1]}, "half": {"seconds": [0.2]}}
    found = [
        Found("", json.dumps({"speed": speed, "timed": each}))
        for speed, each in ((88.4, timed), (910.0, fast))
    ]
    shown = rows("\n".join(write_numbers.crossings(found)))
    assert shown[0] == "||88 Mbit/s, ms|88 Mbit/s|910 Mbit/s, ms|910 Mbit/s|"
    assert shown[2] == "|half|2,000|2.00|200|0.50|"


def test_printed_tables_keep_their_titles_and_lose_the_rank() -> None:
    table = ("| a | b |", "|---|---|", "| 1 | 2 |")
    lines = ["noise", *(f"[rank 0] {line}" for line in ("steps of 2", *table)), "end"]
    text = "\n".join(lines)
    shown = [*write_numbers.printed([Found(text)])]
    assert shown == ["", "**steps of 2**", "", *table]


def test_tries_and_formulas_are_read_from_lines() -> None:
    text = "killed in large                2 of 2   worst 0.19 s\n7 of 7 rows, 3 s\n"
    assert rows("\n".join(write_numbers.tries([Found(text)])))[1:] == [
        "|killed in large|2 of 2|0.19 s|"
    ]
    texts = [Found("one process: 0.98\n.`DDP`: 1.01\n"), Found("`DDP`: 0.97\n.")]
    shown = rows("\n".join(write_numbers.formulas(texts)))[1:]
    assert shown == ["|one process|0.98 to 0.98|", "|`DDP`|0.97 to 1.01|"]


# Running it -------------------------------------------------------------------------------------


def writes(text: str, code: int = 0) -> Part:
    program = (
        f"import sys; print('| a |'); open(sys.argv[1], 'w').write('{text}'); sys.exit({code})"
    )
    return Part([f'python -c "{program}" {FOLDER}/figures.json'], write_numbers.written)


def test_a_command_writes_into_a_folder_of_its_own() -> None:
    found = run(writes("what it found"))
    assert found == [Found("| a |\n", "what it found")]
    part = page_part(writes("x"), [Found("", "| x |\n")], "here")
    assert "figures.json\n```\n\nhere.\n\n| x |" in part


def test_a_command_that_fails_leaves_the_page_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- begin: a -->\nold\n<!-- end: a --><!-- begin: b -->\nold\n<!-- end: b -->"
    )
    monkeypatch.setattr(write_numbers, "PAGE", page)
    monkeypatch.setattr(write_numbers, "PARTS", {"a": writes("new", code=3), "b": writes("new")})
    assert write_numbers.main(["--only", "a,b"]) == 1
    assert "a: exit code 3" in capsys.readouterr().err
    assert pages.split(page.read_text(), "a")[1] == "old"
    assert pages.split(page.read_text(), "b")[1].endswith("\n\nnew")


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(SystemExit) as failed:
        write_numbers.main(["--only", "speed"])
    assert failed.value.code == 2


def test_only_what_is_between_the_marks_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = pages.marks("speeds")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    pages.rewrite(page, "speeds", "| new |\n")
    assert page.read_text() == f"before\n{begin}\n\n| new |\n\n{end}\nafter\n"
    with pytest.raises(ValueError):
        pages.rewrite(page, "others", "| new |\n")
