from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.report import Record, read_record, write_record
from phalanx.launch.supervisor import Attempt, Ending, describe, root_cause, summarise, tell_failure


def ending(rank: int, exitcode: int, *, at: float, follows: bool = False, text: str = "") -> Ending:
    record = Record(text.rpartition("\n")[2], text, follows, at) if text else None
    return Ending(rank, exitcode, record, at, follows)


def test_a_record_is_read_as_written(tmp_path: Path) -> None:
    path = str(tmp_path / "error.json")
    write_record(path, summary="ValueError: x", traceback="Traceback\nValueError: x", follows=True)
    record = read_record(path)
    assert record is not None
    assert (record.summary, record.follows) == ("ValueError: x", True)
    assert record.traceback == "Traceback\nValueError: x"


def test_a_record_is_one_that_torch_reads_too(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = str(tmp_path / "error.json")
    write_record(path, summary="ValueError: x", traceback="", follows=False)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=path)
    assert failure.error_file_data["message"]["message"] == "ValueError: x"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"', json.dumps({"phalanx": 1})])
def test_half_a_record_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert read_record(str(path)) is None
    assert read_record(str(tmp_path / "missing.json")) is None


def test_the_root_cause_is_the_first_failure_of_a_ranks_own() -> None:
    lost = ending(0, 1, at=1.0, follows=True, text="PeerLostError")
    killed = ending(1, -9, at=1.5)
    late = ending(2, 1, at=2.0, text="ValueError: late")
    assert root_cause([lost, late, killed]) is killed


@pytest.mark.parametrize(
    ("failed", "story"),
    [
        (
            ending(2, 1, at=0, text="T\nE: x"),
            "rank 2 failed (exit code 1); its traceback:\nT\nE: x",
        ),
        (ending(2, 7, at=0), "rank 2 failed: exit code 7; it left no traceback"),
        (ending(2, -6, at=0), "rank 2 was killed by signal 6 (SIGABRT); it left no traceback"),
    ],
)
def test_the_story_of_a_failure(failed: Ending, story: str) -> None:
    assert describe(failed) == story


@pytest.mark.parametrize(("code", "shell"), [(1, 1), (3, 3), (-9, 137)])
def test_the_exit_code_is_the_ranks_as_a_shell_counts_it(
    code: int, shell: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tell_failure([ending(1, code, at=0)], nodes=1) == shell
    assert capsys.readouterr().err.startswith("rank 1")


@pytest.mark.parametrize(
    ("failed", "line"),
    [
        (ending(2, 1, at=0, text="T\nE: x"), "rank 2 failed (exit code 1: E: x)"),
        (ending(2, 7, at=0), "rank 2 failed: exit code 7"),
        (ending(2, -9, at=0), "rank 2 was killed by signal 9 (SIGKILL)"),
    ],
)
def test_the_story_in_one_line(failed: Ending, line: str) -> None:
    assert summarise(failed) == line


def test_ranks_that_ended_in_good_order_are_named_beside_those_that_lost_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = ending(0, 1, at=0, follows=True, text="T\nPeerLostError: rank 2 left")
    assert tell_failure([lost], nodes=1, left=[2]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "rank 2 ended with exit code 0"
    tell_failure([lost], nodes=1, left=[1, 2])
    assert capsys.readouterr().err.splitlines()[-1] == "ranks 1, 2 ended with exit code 0"


def test_the_number_of_a_process_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "raise SystemExit(3)"])
    (tmp_path / "pid").write_text(f"{process.pid}\n")
    attempt = Attempt({4: str(tmp_path / "error.json")})
    while (tmp_path / "pid").exists():
        os.sched_yield()
    attempt.close()
    (ending,) = attempt.endings()
    assert (ending.rank, ending.exitcode) == (4, 3)
    assert process.wait() == 3  # its exit code was left for the agent


def test_a_rank_that_was_told_to_stop_is_no_root_cause(tmp_path: Path) -> None:
    attempt = Attempt({rank: str(tmp_path / str(rank) / "error.json") for rank in range(3)})
    attempt.close()
    endings = attempt.endings({0: 143, 1: 7, 2: 0})
    assert [failed.rank for failed in endings] == [0, 1]
    assert root_cause(endings).rank == 1
