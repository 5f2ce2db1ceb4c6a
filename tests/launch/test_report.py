from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx.errors import (
    CollectiveTimeoutError,
    DesyncError,
    DistributedError,
    MisuseError,
    PeerLostError,
    RankStopped,
)
from phalanx.launch.report import (
    RankExit,
    RankReport,
    RankTraceback,
    describe_exit_code,
    describe_failure,
    error_line,
    follows_from_another,
    format_traceback,
    print_failure,
    print_restart,
    root_cause,
)


class TwoArguments(Exception):
    """An error that pickle takes and cannot give back: a common mistake."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def reported(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return RankReport.of_error(2, caught).error()


@pytest.mark.parametrize("value", [None, 3, "text", {"a": [1.5, (2,)]}])
def test_a_result_comes_back(value: Any) -> None:
    assert RankReport.of_result(1, value).result() == value


def test_a_tensor_comes_by_value() -> None:
    tensor = torch.arange(4)
    report = RankReport.of_result(1, tensor)
    tensor.zero_()
    assert report.result().tolist() == [0, 1, 2, 3]


def test_a_result_that_cannot_be_pickled_is_a_clear_error() -> None:
    report = RankReport.of_result(1, lambda: 0)
    assert report.failed
    with pytest.raises(MisuseError, match="rank 1 returned a function, which cannot be pickled"):
        raise report.error()


def test_an_error_comes_back_with_its_traceback_as_cause() -> None:
    error = reported(ValueError("a bug"))
    assert type(error) is ValueError
    assert isinstance(error.__cause__, RankTraceback)
    assert "Rank 2:" in str(error.__cause__)
    assert "raise error" in str(error.__cause__)


def test_an_error_keeps_what_it_knows() -> None:
    error = reported(DesyncError("they differ", rank=2, peer=1, op="all_reduce", sequence=41))
    assert isinstance(error, DesyncError)
    assert (error.rank, error.peer, error.op, error.sequence) == (2, 1, "all_reduce", 41)


def test_an_error_that_pickle_loses_is_told_by_another() -> None:
    error = reported(TwoArguments("lost ", "in transit"))
    assert type(error) is DistributedError
    assert "TwoArguments: lost in transit" in str(error)
    assert "rank 2" in str(error)


def test_a_rank_that_leaves_is_a_lost_peer() -> None:
    error = reported(SystemExit(3))
    assert isinstance(error, PeerLostError)
    assert error.peer == 2
    assert "sys.exit(3)" in str(error)


def test_a_death_names_rank_and_signal() -> None:
    error = RankExit(1, -9, None, 0.0).error()
    assert isinstance(error, PeerLostError)
    assert error.peer == 1
    assert "rank 1" in str(error)
    assert "SIGKILL" in str(error)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended without a result: exit code 0"),
        (1, "what it wrote to stderr may say why"),
        (-9, "the kernel does that when memory runs out"),
        (143, "after a SIGTERM, sent from outside"),
    ],
)
def test_a_death_says_what_may_have_led_to_it(code: int, words: str) -> None:
    assert words in str(RankExit(1, code, None, 0.0).error())


def test_root_cause_is_the_first_that_does_not_follow() -> None:
    lost = RankExit(0, None, RankReport(0, True, follows=True), 1.0)
    late = RankExit(1, None, RankReport(1, True), 3.0)
    root = RankExit(2, -9, None, 2.0)
    assert root_cause([lost, late, root]) is root


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
            "rank 2 was killed by signal 9 (SIGKILL), not by this launcher; the kernel does that "
            "when memory runs out",
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


def test_a_rank_that_is_killed_while_it_ends_has_the_exit_code_that_it_reported() -> None:
    report = RankReport(0, True, summary="sys.exit(75)", code=75)
    assert RankExit(0, -9, report).shell_code == 75
    assert RankExit(0, 75, report).shell_code == 75


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


def test_ranks_that_have_left_have_not_failed_and_are_named_where_others_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 75, after a notice. A rank that left by itself is lost to the others."""
    assert root_cause([ended(0, 75), ended(1, 0), ended(2, 143, told=True)]) is None
    lost = ended(0, 1, follows=True, text="T\nPeerLostError: rank 1 left")
    assert root_cause([lost, ended(1, 75)]) is lost
    print_failure([lost, ended(1, 75)])
    assert capsys.readouterr().err.splitlines()[-1] == "rank 1 ended with exit code 75"


def test_a_rank_that_owes_a_result_does_not_leave() -> None:
    assert RankExit(0, 75, None, 0.0, owes_result=True).failed


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
    by_others = ended(0, code, at=1)
    assert root_cause([by_others, failed]) is by_others
    assert root_cause([stopped, killed]) is None


def raised(*, first: BaseException, then: Exception, how: str) -> BaseException:
    try:
        try:
            raise first
        except BaseException as error:
            if how == "from":
                raise then from error
            if how == "from None":
                raise then from None
            raise then  # noqa: B904
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (PeerLostError("rank 2 died", peer=2), True),
        (RankStopped(), True),
        (ValueError("a bug"), False),
        (CollectiveTimeoutError("rank 2 did not call", peer=2), False),
        (ConnectionError("of the user's own"), False),
    ],
)
def test_a_lost_peer_is_another_ranks_failure(error: BaseException, follows: bool) -> None:
    assert follows_from_another(error) is follows


@pytest.mark.parametrize(("how", "follows"), [("from", True), ("", True), ("from None", False)])
def test_an_error_raised_while_handling_a_lost_peer_follows_too(how: str, follows: bool) -> None:
    lost = PeerLostError("rank 2 died", peer=2)
    error = raised(first=lost, then=RuntimeError("step failed"), how=how)
    assert follows_from_another(error) is follows


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not follows_from_another(first)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"),
        (-9, "killed by signal 9 (SIGKILL)"),
        (-250, "killed by signal 250"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe_exit_code(code) == words


def test_an_error_is_one_line_whatever_it_says() -> None:
    assert error_line(ValueError("a bug\nof two lines")) == "ValueError: a bug"
    assert error_line(KeyError()) == "KeyError"
    assert error_line(PeerLostError("rank 2 left")).endswith("PeerLostError: rank 2 left")


def test_a_syntax_error_is_its_last_line() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("def f(:", "script.py", "exec")
    assert error_line(caught.value) == "SyntaxError: invalid syntax"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before 3.11")
def test_notes_are_in_the_traceback_and_not_in_the_line() -> None:
    error = ValueError("a bug")
    error.add_note("the last operations of rank 0:")
    assert error_line(error) == "ValueError: a bug"
    assert "the last operations" in format_traceback(error, hide=())


def test_a_traceback_has_the_programs_own_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program calls Phalanx, which calls the program."""
    monkeypatch.delenv("PHALANX_LOG", raising=False)

    def fails(backend: phalanx.Backend) -> None:
        raise ValueError("a bug")

    def program() -> None:
        try:
            phalanx.simulate(fails, 1)
        except ValueError as error:
            raise RuntimeError("more") from error

    with pytest.raises(RuntimeError) as caught:
        program()
    text = format_traceback(caught.value, hide=())
    assert text.count(__file__) == 4
    assert "simulate.py" not in text
    monkeypatch.setenv("PHALANX_LOG", "debug")
    assert "simulate.py" in format_traceback(caught.value, hide=())


def test_what_an_error_of_this_package_came_from_has_no_lines_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_LOG", raising=False)
    with pytest.raises(phalanx.CheckpointError) as caught:
        phalanx.load_pretrained(tmp_path / "none", torch.nn.Linear(1, 1))
    text = format_traceback(caught.value, hide=())
    assert "pretrained.py" not in text
    assert __file__ in text


def test_a_fault_of_this_package_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_LOG", raising=False)
    with pytest.raises(AttributeError) as caught:
        phalanx.simulate(print, 1, crashes=7)  # type: ignore[arg-type]  # which it does not check
    assert "simulate.py" in format_traceback(caught.value, hide=())


def test_an_error_of_this_package_alone_keeps_its_lines() -> None:
    with pytest.raises(TypeError) as caught:
        phalanx.simulate(3, 1)  # type: ignore[arg-type]
    assert "simulate.py" not in format_traceback(caught.value, hide=())
    assert "simulate.py" in format_traceback(caught.value, hide=[__file__])
