from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

import phalanx.tools.doctor.examine as examining
from phalanx.cli.app import app
from phalanx.launch.init import BACKENDS
from phalanx.tools.doctor.checks import Finding, fail, info, ok, warn
from phalanx.tools.doctor.examine import SHARING, SUBJECTS, Line, as_markdown, examine, share_memory
from phalanx.tools.doctor.machine import (
    MACHINE,
    NETWORK,
    cpu_quota,
    judge_clock,
    judge_name,
    judge_open_files,
    judge_shared_memory,
)
from phalanx.tools.doctor.software import (
    SOFTWARE,
    VARIABLES,
    below,
    judge_packages,
    judge_threads,
    shown_variables,
)

QUICK = [SOFTWARE, MACHINE, VARIABLES, NETWORK, SHARING]
"""All but the backends, for which ranks are started: see tests/multiprocess."""


@pytest.mark.parametrize("checks", QUICK, ids=lambda checks: next(iter(checks)))
def test_every_check_finds_something_and_says_what_to_do(checks: dict[str, object]) -> None:
    for line in examine({"here": checks}):  # type: ignore[dict-item]
        assert line.finding.what, line
        assert "the check failed" not in line.finding.what, line
        assert line.finding.status in ("ok", "info") or line.finding.hint, line


def test_every_backend_is_tried() -> None:
    assert BACKENDS.keys() - {"auto"} < SUBJECTS["Backends"].keys()


def test_a_check_that_raises_has_failed_and_the_others_go_on() -> None:
    def broken() -> Finding:
        raise OSError("no such device")

    lines = list(examine({"a": {"broken": broken, "fine": lambda: ok("yes")}}))
    assert [line.finding.status for line in lines] == ["fail", "ok"]
    assert "OSError: no such device" in lines[0].finding.what


def test_the_report_is_markdown_with_what_to_do() -> None:
    findings = [ok("good"), info("so"), warn("near", "do this"), fail("bad", "do that")]
    lines = [Line("Machine" if n < 2 else "Network", str(n), f) for n, f in enumerate(findings)]
    assert list(as_markdown(lines)) == [
        "\n### Machine\n",
        "- 0: good",
        "- 1: so",
        "\n### Network\n",
        "- **WARN** 2: near -- do this",
        "- **FAIL** 3: bad -- do that",
    ]


@pytest.mark.parametrize(("finding", "exitcode"), [(warn("so", "do"), 0), (fail("no", "do"), 1)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_exit_code_says_whether_a_check_failed(
    monkeypatch: pytest.MonkeyPatch, finding: Finding, exitcode: int, options: list[str]
) -> None:
    monkeypatch.setattr(examining, "examine", lambda: iter([Line("a", "b", finding)]))
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == exitcode
    if options:
        report = json.loads(result.output)
        assert report["ok"] is (exitcode == 0)
        assert report["findings"][0]["status"] == finding.status
    else:
        assert f"**{finding.status.upper()}** b: {finding.what} -- do" in result.output


def test_a_secret_is_never_shown() -> None:
    environ = {
        "PHALANX_TOKEN": "abcdefgh" * 8,
        "NCCL_API_KEY": "sesame",
        "MASTER_PORT": "29500",
        "HOME": "/home/someone",
    }
    assert shown_variables(environ) == [
        "MASTER_PORT=29500",
        "NCCL_API_KEY: set, 6 characters",
        "PHALANX_TOKEN: set, 64 characters",
    ]


def test_a_token_is_told_by_its_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for token, status in (("x" * 15, "fail"), ("x" * 64, "ok")):
        monkeypatch.setenv("PHALANX_TOKEN", token)
        finding = VARIABLES["token"]()
        assert finding.status == status
        assert str(len(token)) in finding.what
        assert token not in f"{finding}"


def test_an_environment_that_makes_no_sense_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    finding = VARIABLES["launcher"]()
    assert finding.status == "fail"
    assert "RANK=2" in finding.what


@pytest.mark.parametrize(
    ("requirements", "status"),
    [
        (["pytest>=1.0", 'ray>=2.40; extra == "ray"'], "ok"),
        (["pytest>=1000"], "fail"),
        (["no-such-package-at-all>=1"], "fail"),
        (['no-such-package-at-all>=1 ; extra == "mpi"'], "ok"),
    ],
)
def test_what_is_needed_must_be_there_and_new_enough(requirements: list[str], status: str) -> None:
    assert judge_packages(requirements).status == status


@pytest.mark.parametrize(
    ("has", "least", "older"),
    [
        ("2.13.0+cpu", "2.6", False),
        ("2.5.1", "2.6", True),
        ("4", "4.0", True),
        ("10", "9.1", False),
    ],
)
def test_versions_are_compared_by_number(has: str, least: str, older: bool) -> None:
    assert below(has, least) is older


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("nonsense", None)]
)
def test_the_control_groups_quota_is_in_cores(
    tmp_path: Path, text: str, quota: float | None
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_an_old_control_group_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 2.0
    assert cpu_quota(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (judge_open_files(256, 4096), "warn"),
        (judge_open_files(-1, -1), "ok"),
        (judge_shared_memory(64 << 20, 64 << 20), "warn"),
        (judge_shared_memory(1 << 30, 1 << 30), "ok"),
        (judge_clock(0.0, 1e-9, False), "warn"),
        (judge_clock(1.8e9, 1e-9, True), "warn"),
        (judge_clock(1.8e9, 1e-9, False), "ok"),
        (judge_name("a", [], 0.1, "not known"), "warn"),
        (judge_name("a", ["10.0.0.1"], 5.0), "warn"),
        (judge_name("a", ["127.0.1.1"], 0.1), "info"),
        (judge_name("a", ["10.0.0.1"], 0.1), "ok"),
        (judge_threads(None, 2), "ok"),
        (judge_threads("3", 2), "warn"),
        (judge_threads("many", 2), "warn"),
        (judge_threads("2", 2), "ok"),
    ],
)
def test_what_is_little_is_a_warning_with_a_way_out(finding: Finding, status: str) -> None:
    assert finding.status == status, finding
    assert bool(finding.hint) is (status in ("warn", "info"))


def test_memory_is_shared_with_a_second_process_and_nothing_is_left(tmp_path: Path) -> None:
    assert share_memory(tmp_path).status == "ok"
    assert list(tmp_path.iterdir()) == []
    finding = share_memory(tmp_path / "missing")
    assert finding.status == "fail"
    assert finding.hint


def test_a_temporary_folder_that_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", None)
    finding = MACHINE["temporary files"]()
    assert finding.status == "warn"
    assert "cannot be used" in finding.what


def test_without_a_network_the_checks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, os.strerror(99))

    for name in ("create_server", "getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    found = {line.check: line.finding.status for line in examine({"n": NETWORK})}
    assert found["loopback"] == "fail"
    assert found["host name"] == "warn"
    assert found["route"] == "info"
