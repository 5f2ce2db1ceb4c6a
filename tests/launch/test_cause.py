from __future__ import annotations

import pytest

from phalanx.errors import CollectiveTimeoutError, PeerLostError, RankStopped
from phalanx.launch.report import describe_exit_code, follows_from_another


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
