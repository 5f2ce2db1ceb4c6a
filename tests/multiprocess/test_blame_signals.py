"""A rank is killed or stopped; those that are left say which one, and say it soon.

The short form: `make blame` tries each of these many times, and measures.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from blame_ends import ENDS, end_by
from blame_kills import kill_and_go_on, kill_and_vanish, kill_in, kill_while_closing
from blame_silence import WAYS, never_calls
from blame_stops import hold_in, stop_in, stop_shortly
from blame_traffic import TRAFFIC

SLOW = 20.0  # seconds, for a machine on which much else runs: who is named matters here


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_every_survivor_names_the_rank_that_was_killed(traffic: str) -> None:
    assert kill_in(traffic, seed=1, within=SLOW).wrong == ""


def test_those_that_die_of_the_death_at_once_are_not_taken_for_its_cause() -> None:
    assert kill_and_vanish(seed=1, within=SLOW).wrong == ""


def test_those_that_are_left_go_on_in_a_group_of_their_own() -> None:
    assert kill_and_go_on(seed=1, within=SLOW).wrong == ""


def test_a_rank_that_is_killed_while_it_closes_is_named() -> None:
    assert kill_while_closing(seed=1, within=SLOW).wrong == ""


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_that_ends_by_itself_is_named_and_how_it_went_is_said(name: str) -> None:
    assert end_by(name, seed=1, within=SLOW).wrong == ""


def test_a_rank_that_never_calls_is_named_at_the_deadline_also_by_way_of_others() -> None:
    # Long enough for those who wait to ask each other, on a machine that is busy. The jobs of all
    # ways wait at the same time, so that it passes once.
    with ThreadPoolExecutor(len(WAYS)) as pool:
        tries = [pool.submit(never_calls, way, 1, timeout=2.0, within=SLOW) for way in WAYS]
    assert [each.result().wrong for each in tries] == [""] * len(WAYS)


def test_a_stopped_rank_is_given_up_and_learns_it_when_it_comes_back() -> None:
    assert stop_in("large", seed=1, heartbeat=1.0, within=SLOW).wrong == ""


def test_a_stopped_rank_is_given_up_also_if_nobody_waits_for_what_is_under_way() -> None:
    assert stop_in("unattended", seed=2, heartbeat=1.0, within=SLOW).wrong == ""


def test_a_rank_that_is_stopped_for_a_moment_is_not_given_up() -> None:
    assert stop_shortly("all_reduce", seed=1, seconds=0.3).wrong == ""


def test_a_rank_that_holds_the_interpreter_on_this_host_is_not_given_up() -> None:
    assert hold_in("training", seed=1, seconds=1.5, heartbeat=0.6).wrong == ""
