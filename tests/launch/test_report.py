from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.errors import DesyncError, DistributedError, MisuseError, PeerLostError
from phalanx.launch.report import RankExit, RankReport, RankTraceback, root_cause


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
        (1, 'needs `if __name__ == "__main__":` around the call'),
        (-9, "the kernel does when memory runs out"),
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
