"""docs/recipes.md: each recipe runs, checks itself, and prints what its page shows.

Ranks are simulated. The commands as they are, other packages, compilers and hosts: `make recipes`.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
from processes import run_job
from recipes_page import FILES, PAGE, Section, path, same, script, sections

import phalanx

SECTIONS = sections()
LONGEST = 40
ELSEWHERE = {"lora.py", "hugging_face.py", "compiled.py"}  # tests/clients/test_recipe_commands.py
IN_PROCESSES = {"profile_a_step.py"}  # torch's profiler is one for all threads
OF_THEIR_OWN = {"preemption.py", "kubernetes.py", "two_laptops.py", "own_collective.py"}  # below
SIMULATED = [
    section
    for section in SECTIONS
    if not {*section.files} & (ELSEWHERE | IN_PROCESSES | OF_THEIR_OWN)
]


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for checkpoints


def simulate(name: str, ranks: int) -> None:
    phalanx.simulate(runpy.run_path(str(path(name)))["main"], ranks)


def output_of(name: str) -> str:
    """What the page shows below the commands of a recipe."""
    (section,) = (each for each in SECTIONS if name in each.files)
    return "".join(shown for _, shown in section.runs)


# What they print --------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SIMULATED, ids=lambda section: section.files[0])
def test_a_recipe_prints_what_its_page_shows(
    section: Section, capsys: pytest.CaptureFixture[str]
) -> None:
    for commands, shown in section.runs:
        for command in commands:
            ranks, name = script(command)
            simulate(name, ranks)
        out = capsys.readouterr().out
        assert same(out, shown), out


@pytest.mark.parametrize("name", sorted(IN_PROCESSES))
def test_a_recipe_prints_in_processes_what_its_page_shows(name: str) -> None:
    done = run_job([str(path(name))], 2)
    assert [each.returncode for each in done] == [0, 0], done
    assert same(done[0].stdout, output_of(name)), done[0].stdout


def test_ranks_that_get_a_notice_end_with_75_and_go_on_at_the_next_start(tmp_path: Path) -> None:
    out = ""
    for code in (75, 0):
        done = run_job([str(path("preemption.py"))], 2, folder=tmp_path)
        assert [each.returncode for each in done] == [code] * 2, done
        out += done[0].stdout
    assert same(out, output_of("preemption.py")), out


def test_after_a_pod_has_died_the_next_start_goes_on_from_what_was_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="a pod that dies"):
        simulate("kubernetes.py", 2)
    simulate("kubernetes.py", 2)
    assert same(capsys.readouterr().out, output_of("kubernetes.py"))


def test_the_laptops_print_the_same_as_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    simulate("two_laptops.py", 2)
    shown = output_of("two_laptops.py").replace("hosts: 2", "hosts: 1")
    assert same(capsys.readouterr().out, shown)


@pytest.mark.parametrize("name", re.findall(r"def (test_\w+)", FILES["own_collective.py"]))
def test_the_tests_of_ones_own_collective_pass(name: str) -> None:
    runpy.run_path(str(path("own_collective.py")))[name]()


def test_three_ranks_go_on_with_the_losses_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        simulate("resume_elsewhere.py", 1)
    assert same(capsys.readouterr().out, output_of("resume_elsewhere.py"))


# The page ---------------------------------------------------------------------------------------


def test_there_are_at_least_eighteen_recipes_of_at_most_40_lines() -> None:
    assert len(FILES) >= 18
    assert {n: k for n, text in FILES.items() if (k := len(text.splitlines())) > LONGEST} == {}


def test_each_recipe_has_one_section_and_one_row_of_the_table() -> None:
    assert sorted(name for section in SECTIONS for name in section.files) == sorted(FILES)
    rows = re.findall(r"^\| \[([^\]]+)\]\(#([\w-]+)\) \| `(\w+\.py)` \|", PAGE, flags=re.MULTILINE)
    assert [(title, [name]) for title, _, name in rows] == [s[:2] for s in SECTIONS]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.files[0])
def test_a_section_shows_lines_of_its_file_and_its_output(section: Section) -> None:
    text = FILES[section.files[0]]
    stripped = "\n".join(line.strip() for line in text.splitlines())
    assert section.lines
    for shown in section.lines:
        for part in shown.split("\n...\n"):
            assert "\n".join(line.strip() for line in part.strip().splitlines()) in stripped, part
    assert section.runs or "pytest" in text


@pytest.mark.parametrize("name", FILES)
def test_a_docstring_says_in_a_few_lines_what_is_shown_and_how_it_is_run(name: str) -> None:
    doc = ast.get_docstring(ast.parse(FILES[name])) or ""
    what, empty, *commands = doc.splitlines()
    assert what.endswith(".")
    assert not empty
    assert 1 <= len(commands) <= 2
    for command in commands:
        assert command.split("      ")[0] in PAGE


def test_numbers_may_differ_by_rounding_and_words_may_not() -> None:
    assert same("loss 1.0001 of 3\n", "[rank 0] loss 1.0000 of 3\n")
    assert not same("loss 1.1 of 3", "loss 1.0 of 3")
    assert not same("loss 1.0 of 4", "loss 1.0 of 3")
    assert not same("a", "b")
