from __future__ import annotations

import pytest

from phalanx.launch.report import (
    RankExit,
    RankReport,
    describe_failure,
    print_failure,
    print_restart,
    root_cause,
)


def ended(
    rank: int,
    code: int,
    *,
    at: float = 0,
    follows: bool = False,
    text: str = "",
    told: bool = False,
    killed: bool = False,
) -> RankExit:
    summary = text.rpartition("\n")[2]
    report = RankReport(rank, True, b"", summary, text, follows, at) if text else None
    return RankExit(rank, code, report, at, told, killed)


def test_a_report_is_decoded_when_it_is_whole() -> None:
    report = RankReport(1, True, b"pickled", "ValueError: x", "Traceback\nValueError: x", True)
    data = report.encode()
    assert RankReport.decode(bytearray(data)) == report
    for size in (0, 3, 8, len(data) - 1):
        assert RankReport.decode(bytearray(data[:size])) is None


def test_the_root_cause_is_the_first_failure_of_a_ranks_own() -> None:
    lost = ended(0, 1, at=1.0, follows=True, text="PeerLostError")
    killed = ended(1, -9, at=1.5)
    late = ended(2, 1, at=2.0, text="ValueError: late")
    assert root_cause([lost, late, killed]) is killed


@pytest.mark.parametrize(
    ("failed", "report"),
    [
        (ended(2, 1, text="T\nE: x"), "rank 2 failed (exit code 1); its traceback:\nT\nE: x"),
        (ended(2, -9, text="T\nE: x"), "rank 2 failed (exit code 1); its traceback:\nT\nE: x"),
        (ended(2, 7), "rank 2 failed: exit code 7; it left no traceback"),
        (ended(2, -6), "rank 2 was killed by signal 6 (SIGABRT); it left no traceback"),
        (
            ended(2, -9),
            "rank 2 was killed by signal 9 (SIGKILL); nobody here sent it: the kernel does when "
            "memory runs out",
        ),
        (
            ended(2, 143),
            "rank 2 failed: exit code 143 is what it ends with after a SIGTERM, sent from outside",
        ),
    ],
)
def test_the_report_of_a_failure(failed: RankExit, report: str) -> None:
    assert describe_failure(failed) == report


@pytest.mark.parametrize(("code", "shell"), [(1, 1), (3, 3), (-9, 137)])
def test_the_exit_code_is_the_ranks_as_a_shell_counts_it(
    code: int, shell: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(1, code).shell_code == shell
    print_failure([ended(1, code)])
    assert capsys.readouterr().err.startswith("rank 1")


@pytest.mark.parametrize(
    ("failed", "line"),
    [
        (ended(2, 1, text="T\nE: x"), "rank 2 failed (exit code 1: E: x)"),
        (ended(2, 7), "rank 2 failed: exit code 7"),
        (ended(2, -9), "rank 2 was killed by signal 9 (SIGKILL)"),
    ],
)
def test_the_report_in_one_line(failed: RankExit, line: str) -> None:
    assert describe_failure(failed, brief=True) == line


def test_ranks_that_ended_in_good_order_are_named_beside_those_that_lost_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = ended(0, 1, follows=True, text="T\nPeerLostError: rank 2 left")
    assert lost.shell_code == 1
    print_failure([lost, ended(2, 0)])
    assert capsys.readouterr().err.splitlines()[-1] == "rank 2 ended with exit code 0"
    print_failure([lost, ended(1, 0), ended(2, 0)])
    assert capsys.readouterr().err.splitlines()[-1] == "ranks 1, 2 ended with exit code 0"


def test_what_failed_on_another_node_is_told_before_what_followed_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = ended(0, 1, follows=True, text="T\nPeerLostError: rank 2 left")
    stopped = ended(1, 143, told=True)
    print_failure([lost, stopped], "the first failure was on another node, 1: rank 2 failed")
    assert capsys.readouterr().err.splitlines() == [
        "the first failure was on another node, 1: rank 2 failed; here, because of it:",
        "rank 0 failed (exit code 1); its traceback:",
        "T",
        "PeerLostError: rank 2 left",
    ]
    print_failure([stopped], "the first failure was on another node, 1: rank 2 failed")
    assert capsys.readouterr().err == "the first failure was on another node, 1: rank 2 failed\n"


def test_a_restart_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    failed = ended(1, 1, text="T\nE: x")
    print_restart([ended(0, 143, told=True), failed], "", "restarting all ranks (1 of 2)")
    assert capsys.readouterr().err.splitlines() == [
        "rank 1 failed (exit code 1); its traceback:",
        "T",
        "E: x",
        "rank 1 failed (exit code 1: E: x); restarting all ranks (1 of 2)",
    ]


@pytest.mark.parametrize("code", [143, 130, -15, -2])
def test_a_rank_that_was_told_to_stop_is_no_root_cause(code: int) -> None:
    stopped, killed = ended(0, code, at=1, told=True), ended(3, -9, at=0, killed=True)
    failed = ended(1, 7, at=2)
    assert root_cause([stopped, killed, failed]) is failed
    assert root_cause([ended(0, code, at=1), failed]).rank == 0, "somebody else has stopped it"
