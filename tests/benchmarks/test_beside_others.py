"""`benchmarks/beside_others.py`: its part of docs/beside-others.md, and the libraries in it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from documents import PAGES
from processes import run_job

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import beside_others
import pages
from beside_others import (
    LIBRARIES,
    MARK,
    NAMES,
    PEERS,
    SIZES,
    TAKING_PART,
    Reports,
    complaints,
    page_part,
)

from phalanx.ops.bench import peers
from phalanx.ops.bench.report import BenchReport
from phalanx.ops.bench.request import Entry, LeftOut, ResultLine, make_request

PAGE = PAGES["docs/beside-others.md"]
MACHINE = {"processor": "P", "cores": 2, "system": "S", "python": "3.10.1", "load": 0.25}


def line(operation: str, peer: str, seconds: float, size: int = 0, wrong: int = 0) -> ResultLine:
    return ResultLine(
        operation=operation,
        ranks=2,
        bytes=size,
        entry=Entry(peer),
        calls=1,
        seconds=[seconds, 2 * seconds, 3 * seconds],
        bus=1.0,
        wrong=wrong,
    )


def reports(*, left_out: str = "", reason: str = "", wrong: int = 0) -> Reports:
    """Made up: the n-th of those that take part needs n times as long as the first."""
    found = {}
    for operation, names in TAKING_PART.items():
        request = make_request(
            [operation],
            backends=",".join(names),
            sizes=",".join(map(str, SIZES)),
            rounds=3,
            machine=False,
            peers={**peers.PEERS, **PEERS},
        )
        report = found[operation] = BenchReport(request, [2], MACHINE)
        for size in SIZES if operation == "all_reduce" else (0,):
            for place, name in enumerate(names, 1):
                if not name.startswith(left_out or "nobody"):
                    report.add(line(operation, name, place * 1e-3, size, wrong))
                elif not size:
                    report.add(LeftOut(name, 2, reason))
    return found


def tables(part: str) -> list[list[list[str]]]:
    """The cells of the rows of each table."""
    found = re.findall(r"(?:^\|.*\|\n)+", part, re.MULTILINE)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in one.splitlines()]
        for one in found
    ]


def marked(page: str) -> str:
    return pages.split(page, MARK)[1]


def with_versions(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    def version(package: str) -> str | None:
        return None if package in missing else "1.2"

    monkeypatch.setattr(beside_others, "installed_version", version)


# The page -----------------------------------------------------------------------------------------


def test_the_marked_part_of_the_page_has_the_form_that_the_script_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tables, their heads and their first columns; libraries may be missing in one of them."""
    with_versions(monkeypatch)
    written, shown = tables(page_part(reports(), "2026-01-02", 2.0)), tables(marked(PAGE))
    assert [one[0] for one in shown] == [one[0] for one in written]
    for made, there in zip(written, shown, strict=True):
        names = [row[0] for row in there]
        assert names == [row[0] for row in made if row[0] in names]
    facts, libraries, collectives, *_ = shown
    assert [row[0] for row in facts[2:]] == [row[0] for row in written[0][2:]]
    assert [row[0] for row in libraries[2:]] == [library.name for library in LIBRARIES]
    assert [row[0] for row in collectives[2:]] == [*SIZES.values()]


def test_each_library_of_the_page_has_a_version_or_is_not_installed() -> None:
    _, libraries, *_ = tables(marked(PAGE))
    for name, version, state in libraries[2:]:
        assert re.match(r"\d+\.\d", version) or version == "not installed", name
        assert (version == "not installed") == state.startswith("not installed"), name


def test_a_library_that_is_not_measured_has_no_number() -> None:
    _, libraries, *measured = tables(marked(PAGE))
    with_numbers = {row[0] for one in measured for row in one[2:]} | set(measured[0][0])
    for library, row in zip(LIBRARIES, libraries[2:], strict=True):
        names = {NAMES[peer] for peer in library.peers}
        assert (row[2] == "measured") == bool(names & with_numbers), library.name


def test_the_date_of_the_page_is_a_day() -> None:
    facts, *_ = tables(marked(PAGE))
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", dict(facts[2:])["date"])


def test_every_column_of_the_features_is_a_library_that_is_named_with_its_version() -> None:
    features = [one for one in tables(PAGE) if "Horovod" in one[0]]
    assert len(features) == 3
    for one in features:
        assert one[0][1:] == [library.name for library in LIBRARIES]


def test_a_yes_for_another_library_has_a_source() -> None:
    for one in tables(PAGE):
        if "Horovod" in one[0]:
            for row in one[2:]:
                for name, cell in zip(one[0][2:], row[2:], strict=True):
                    assert not re.match(r"yes|both", cell), f"{row[0]}, {name}: no link"


# What the script writes ---------------------------------------------------------------------------


def test_medians_and_ratios_are_those_of_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch)
    _, _, collectives, ddp, fsdp = tables(page_part(reports(), "2026-01-02", 2.0))
    assert collectives[2] == ["8 B", "2,000", "4,000", "6,000", "3.0", "1.5"]
    assert ddp[2][1:] == ["2", "2 to 2", "3.00"]
    assert [row[0] for row in ddp[2:]] == [NAMES[peer] for peer in TAKING_PART["ddp"]]
    assert [row[3] for row in fsdp[2:]] == ["3.00", "1.50", "1.00", "0.75"]


def test_every_library_of_the_script_takes_part_in_something() -> None:
    asked = {name for names in TAKING_PART.values() for name in names}
    assert asked == {name for library in LIBRARIES for name in library.peers} == {*NAMES}
    assert set(PEERS) < asked


def test_a_library_that_is_missing_is_named_without_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_versions(monkeypatch, "deepspeed")
    part = page_part(reports(left_out="deepspeed", reason="deepspeed is not installed"), "day", 2.0)
    assert "| DeepSpeed | not installed | not installed: no number is given |" in part
    assert "DeepSpeed over Gloo" not in part


def test_a_library_that_fails_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch)
    part = page_part(reports(left_out="torchft", reason="rank 0: OSError: a | b"), "day", 2.0)
    assert "| torchft | 1.2 | failed: rank 0: OSError: a / b |" in part


def test_a_wrong_result_is_complained_of_and_no_page_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = reports(wrong=3)
    assert "WRONG: ddp 0 x 2 ranks, shm: 3 elements" in [*complaints(made)]
    monkeypatch.setattr(beside_others, "measure", lambda rounds, say: made)
    monkeypatch.setattr(pages, "rewrite", lambda *_: pytest.fail("it was written"))
    assert beside_others.main(["--write"]) == 1


# The libraries ------------------------------------------------------------------------------------


RANK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from beside_others import measure
report = measure(1, lambda text: None, operations=["ddp"], width=64)["ddp"]
print(json.dumps([
    {line.entry.peer: line.wrong for line in report.lines},
    {left.peer: left.reason for left in report.left_out},
]))
"""


def test_each_library_that_is_installed_trains_as_one_process_does() -> None:
    """One that is not is left out, with the reason."""
    first, _ = run_job(["-c", RANK, str(Path(beside_others.__file__).parent)], 2)
    assert first.returncode == 0, first.stderr
    wrong, left_out = json.loads(first.stdout.splitlines()[-1])
    assert wrong == dict.fromkeys((name for name in wrong), 0)
    assert set(wrong) | set(left_out) == {*TAKING_PART["ddp"]}
    others = {name: PEERS[name].lacks() for name in TAKING_PART["ddp"] if name in PEERS}
    assert left_out == {name: why for name, why in others.items() if why}
