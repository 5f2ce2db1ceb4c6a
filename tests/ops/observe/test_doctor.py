from __future__ import annotations

import importlib
import json
import os
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from clusters import needs_reading
from typer.testing import CliRunner

from phalanx.cli.app import app, run_checks
from phalanx.launch.init import BACKENDS
from phalanx.ops.machine import (
    Finding,
    cpu_quota,
    fail,
    find_packages,
    find_threads,
    info,
    is_older,
    judge_clock,
    judge_name,
    judge_open_files,
    judge_shared_memory,
    ok,
    shown_variables,
    warn,
)
from phalanx.ops.observe.doctor import CHECKS, Check, as_markdown

QUICK = [check for check in CHECKS if check.section != "Backends"]
"""All but the backends, for which ranks are started: see tests/multiprocess."""


def found(section: str, name: str) -> Finding:
    """What the check of this name finds here."""
    (check,) = (check for check in CHECKS if (check.section, check.name) == (section, name))
    return check.run()


@pytest.mark.parametrize("check", QUICK, ids=lambda check: f"{check.section}: {check.name}")
def test_every_check_finds_something_and_says_what_to_do(check: Check) -> None:
    finding = check.run()
    assert finding.what
    assert "the check failed" not in finding.what
    assert finding.status in ("ok", "info") or finding.hint


def test_every_backend_is_tried_and_every_check_says_what_it_looks_at() -> None:
    assert BACKENDS.keys() - {"auto"} < {c.name for c in CHECKS if c.section == "Backends"}
    assert all(check.looks_at for check in CHECKS)
    assert len({(check.section, check.name) for check in CHECKS}) == len(CHECKS)


def broken() -> Finding:
    raise OSError("no such device")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_check_that_raises_or_fails_hides_no_other(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    checks = [
        Check("A", "raises", "a device", broken),
        Check("A", "fails", "itself", lambda: fail("no", "do that")),
        Check("B", "fine", "itself", lambda: ok("yes")),
    ]
    assert run_checks(checks, as_json=as_json) == 1
    out = capsys.readouterr().out
    if as_json:
        findings = json.loads(out)["findings"]
        assert [finding["status"] for finding in findings] == ["fail", "fail", "ok"]
        assert "OSError: no such device" in findings[0]["what"]
        return
    assert out.splitlines()[1:4] == [
        "### A",
        "",
        "- **FAIL** raises: the check failed: OSError: no such device -- please report it with all "
        "of this",
    ]
    assert "- **FAIL** fails: no -- do that\n" in out
    assert "### B\n\n- fine: yes\n" in out
    assert out.endswith("3 checks, 2 failed\n")


def test_each_line_is_shown_as_its_check_ends(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []

    def look(what: str) -> Finding:
        shown.append(capsys.readouterr().out)  # what was printed before this check has ended
        return ok(what)

    names = ("first", "second", "third")
    checks = [Check("A", name, "the output so far", partial(look, name)) for name in names]
    assert run_checks(checks, as_json=False) == 0
    assert shown == ["", "\n### A\n\n- first: first\n", "- second: second\n"]


def test_the_report_is_markdown_with_what_to_do() -> None:
    findings = [ok("good"), info("so"), warn("near", "do this"), fail("bad", "do that")]
    assert [as_markdown(Check("Machine", "it", "it", broken), f) for f in findings] == [
        "- it: good",
        "- it: so",
        "- **WARN** it: near -- do this",
        "- **FAIL** it: bad -- do that",
    ]


@pytest.mark.parametrize(("finding", "exitcode"), [(warn("so", "do"), 0), (fail("no", "do"), 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_says_whether_a_check_failed(
    capsys: pytest.CaptureFixture[str], finding: Finding, exitcode: int, as_json: bool
) -> None:
    assert run_checks([Check("a", "b", "it", lambda: finding)], as_json=as_json) == exitcode
    out = capsys.readouterr().out
    if as_json:
        hint = {"what": finding.what, "hint": "do"}
        said = {"subject": "a", "check": "b", "status": finding.status, **hint}
        assert json.loads(out) == {"ok": exitcode == 0, "findings": [said]}
    else:
        assert f"**{finding.status.upper()}** b: {finding.what} -- do" in out


def test_the_help_says_what_it_does() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    assert "The exit code is 1 if anything failed" in " ".join(result.output.split())


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
        finding = found("Environment", "token")
        assert finding.status == status
        assert str(len(token)) in finding.what
        assert token not in f"{finding}"


def test_an_environment_that_makes_no_sense_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    finding = found("Environment", "launcher")
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
    assert find_packages(requirements).status == status


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
    assert is_older(has, least) is older


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
        (find_threads({}, 2), "ok"),
        (find_threads({"OMP_NUM_THREADS": "3"}, 2), "warn"),
        (find_threads({"OMP_NUM_THREADS": "many"}, 2), "warn"),
        (find_threads({"OMP_NUM_THREADS": "2"}, 2), "ok"),
    ],
)
def test_what_is_little_is_a_warning_with_a_way_out(finding: Finding, status: str) -> None:
    assert finding.status == status, finding
    assert bool(finding.hint) is (status in ("warn", "info"))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs a memfd")
def test_memory_is_shared_with_a_second_process_as_ranks_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "Memory between processes", "shared memory"
    assert found(*place).status == "ok"
    with monkeypatch.context() as hidden:
        hidden.setattr(os, "getpid", lambda: 1 << 30)
        finding = found(*place)
        assert (finding.status, bool(finding.hint)) == ("fail", True)
    monkeypatch.delattr(os, "memfd_create")
    finding = found(*place)
    assert finding.status == "info"
    assert "ranks of one host talk over TCP" in finding.what


@needs_reading
def test_a_process_that_may_not_read_anothers_memory_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "Memory between processes", "cross-memory attach"
    with monkeypatch.context() as hidden:
        hidden.setattr(os, "getpid", lambda: 1 << 22)  # more than any process has
        finding = found(*place)
        assert finding.status == "info"
        assert "No such process" in finding.what
        assert "PHALANX_CMA=allow" in finding.hint
    monkeypatch.setenv("PHALANX_CMA", "off")
    assert "PHALANX_CMA=off" in found(*place).what


def test_ranks_need_no_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    for section in ("Machine", "Memory between processes"):
        assert "talk over TCP" not in found(section, "shared memory").what


def test_a_temporary_folder_that_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", None)
    finding = found("Machine", "temporary files")
    assert finding.status == "warn"
    assert "cannot be used" in finding.what


@pytest.mark.parametrize(
    ("name", "value"), [("PHALANX_INTERFACE", "no-such"), ("PHALANX_PORTS", "many")]
)
def test_a_place_where_ranks_cannot_listen_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", "127.0.0.1")
    monkeypatch.setenv("PHALANX_PORTS", "30000-30100")
    finding = found("Network", "route")
    assert finding.status == "ok"
    assert re.search(r"at lo\S* 127\.0\.0\.1, ports 30000 to 30100$", finding.what)
    monkeypatch.setenv(name, value)
    finding = found("Network", "route")
    assert finding.status == "fail"
    assert f"{name}={value}" in finding.what


def test_without_a_network_the_checks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, os.strerror(99))

    for name in ("create_server", "getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    statuses = {name: found("Network", name).status for name in ("loopback", "host name", "route")}
    assert statuses == {"loopback": "fail", "host name": "warn", "route": "info"}


# Engines and trainers ---------------------------------------------------------------------------

EXTRAS = """\
Requires-Dist: accelerate>=1.15; extra == 'accelerate'
Requires-Dist: transformers>=5.23; python_version >= '3.11' and extra == 'transformers'
Requires-Dist: accelerate>=1.15; extra == 'transformers'
Requires-Dist: lightning>=2.6; extra == 'lightning'
Requires-Dist: cloudpickle>=3.0; extra == 'notebook'
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Puts packages into a folder that Python looks at first: their names, versions and modules."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, version: str, requirements: str = "", module: str | None = "") -> None:
        about = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}")
        if module is not None:
            (tmp_path / f"{name}.py").write_text(module)
        importlib.invalidate_caches()

    install("phalanx", "0.1.0", EXTRAS, module=None)
    return install


@pytest.mark.parametrize("name", ["accelerate", "transformers", "lightning"])
def test_a_trainer_that_is_there_is_told_by_its_version(
    installed: Callable[..., None], name: str
) -> None:
    for package in {"accelerate", name}:
        installed(package, "9.1")
    assert found("Engines and trainers", name) == ok("9.1")


def test_a_trainer_that_is_older_than_what_was_tried_is_a_warning(
    installed: Callable[..., None],
) -> None:
    installed("accelerate", "1.14.2")
    finding = found("Engines and trainers", "accelerate")
    assert finding.status == "warn"
    assert finding.what == "accelerate 1.14.2, and 1.15 is the least that was tried"
    assert finding.hint == "pip install --upgrade 'phalanx[accelerate]'"


def test_a_trainer_with_a_torch_that_has_no_backends_of_others_is_a_warning(
    installed: Callable[..., None],
) -> None:
    installed("accelerate", "1.15.0")
    installed("torch", "2.8.1+cpu", module=None)
    finding = found("Engines and trainers", "accelerate")
    assert (finding.status, "torch is 2.8.1+cpu" in finding.what) == ("warn", True)


def test_a_package_without_its_module_or_with_one_that_fails_does_not_work(
    installed: Callable[..., None],
) -> None:
    installed("lightning", "2.6.6", module=None)
    assert found("Engines and trainers", "lightning").status == "warn"
    installed("cloudpickle", "3.1", module="raise ImportError('broken')")
    finding = found("Engines and trainers", "cloudpickle")
    assert (finding.status, "broken" in finding.what) == ("warn", True)


def test_lightning_beside_an_mpi4py_that_finds_no_library_is_a_warning(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed("lightning", "2.6.6")
    installed("mpi4py", "4.1.2", module=None)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for error, status in (("", "ok"), ("raise RuntimeError('no libmpi.so')", "warn")):
        folder = tmp_path / "mpi4py"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("class rc: initialize = True")
        (folder / "MPI.py").write_text(error)
        finding = found("Engines and trainers", "lightning")
        assert finding.status == status
        assert ("no libmpi.so" in finding.what) is bool(error)


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ({}, "info", "not here"),
        ({"srun": "exit 1"}, "warn", "srun ends with 1"),
        ({"srun": "echo slurm 23"}, "warn", "slurm 23"),
        ({"srun": "echo slurm 23", "scontrol": "echo host is DOWN"}, "warn", "host is DOWN"),
        ({"srun": "echo slurm 23", "scontrol": "echo host is UP"}, "ok", "slurm 23; host is UP"),
    ],
)
def test_srun_works_where_its_controller_answers(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answers: dict[str, str],
    status: str,
    said: str,
) -> None:
    for name, line in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = found("Engines and trainers", "srun")
    assert finding.status == status
    assert said in finding.what
