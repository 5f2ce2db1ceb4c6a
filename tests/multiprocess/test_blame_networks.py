"""Ranks on hosts of their own, between which the network fails.

The short form: `make blame` tries each of these many times, and measures.
"""

from __future__ import annotations

import pytest
from blame_closes import close_beside
from blame_partitions import cut_between_two, cut_off, cut_shortly, lose_some
from blame_stops import hold_in, stop_in
from networks import Network, why_not

SLOW = 20.0  # seconds, for a machine on which much else runs: who is named matters here


@pytest.fixture(autouse=True)
def _networks_are_allowed() -> None:
    if why_not():
        pytest.skip(why_not())


@pytest.mark.parametrize("direction", ["both ways", "inward"])
def test_a_rank_whose_host_is_cut_off_is_named_and_the_others_go_on(direction: str) -> None:
    assert cut_off(direction, "all_reduce", seed=1, heartbeat=1.5, within=SLOW).wrong == ""


def test_two_ranks_that_cannot_reach_each_other_say_so() -> None:
    assert cut_between_two("messages", seed=1, heartbeat=1.5, within=SLOW).wrong == ""


def test_a_rank_whose_host_is_cut_off_for_a_moment_is_not_given_up() -> None:
    assert cut_shortly("both ways", "all_reduce", seed=1, seconds=0.5).wrong == ""


def test_a_network_that_loses_packets_raises_no_alarm() -> None:
    assert lose_some("all_reduce", seed=1, seconds=2.0).wrong == ""


def test_a_stopped_rank_on_another_host_is_given_up_and_learns_it_when_it_comes_back() -> None:
    with Network(3) as network:
        verdict = stop_in(
            "all_reduce", seed=1, ranks=3, network=network, heartbeat=1.5, within=SLOW
        )
    assert verdict.wrong == ""


def test_a_rank_on_another_host_that_holds_the_interpreter_for_a_while_is_not_given_up() -> None:
    with Network(3) as network:
        verdict = hold_in("all_reduce", seed=1, seconds=1.0, ranks=3, network=network)
    assert verdict.wrong == ""


def test_close_takes_a_bounded_time_beside_a_rank_that_cannot_be_reached() -> None:
    assert close_beside("cut off", bound=30.0).wrong == ""
