"""Membership: what a process has to do that knows this."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from phalanx.elastic import membership
from phalanx.elastic.membership import (
    Await,
    Bounds,
    Decision,
    Enter,
    HeldPart,
    JoinGeneration,
    Newcomer,
    Propose,
    Report,
    StandBy,
    View,
    WriteReport,
    newest_complete,
    next_action,
    who_stays,
)


def newcomer(process: str) -> Newcomer:
    return Newcomer(process, f"{process}:1")


def arriving(process: str, there: Sequence[str], **known: object) -> View:
    """What a process knows that wants to join; `there` has an entry each."""
    return View(process, f"{process}:1", newcomers=tuple(map(newcomer, there)), **known)


def replica(version: int) -> tuple[HeldPart, ...]:
    return (HeldPart(version, 3, 0, 1),)


def report(rank: int, lost: Collection[int] = (), **said: object) -> Report:
    return Report(3, rank, f"{'abcdefgh'[rank]}:1", tuple(lost), **{"held": replica(7), **said})


def member(rank: int, reports: Sequence[Report], *, size: int = 4, **known: object) -> View:
    """What a member of generation 3 knows; its own report, if it is there, says its losses."""
    own = next((each for each in reports if each.rank == rank), report(rank))
    process = "abcdefgh"[rank]
    return View(
        process,
        f"{process}:1",
        **{
            "generation": 3,
            "members": tuple("abcdefgh"[:size]),
            "lost": own.lost,
            "held": own.held,
            "newcomers": own.newcomers,
            "silent": own.silent,
            "reports": tuple(reports),
            **known,
        },
    )


def proposed(view: View) -> Decision:
    action = next_action(view)
    assert isinstance(action, Propose), action
    return action.decision


# The first generation --------------------------------------------------------------------------


def test_a_newcomer_enters_first() -> None:
    assert next_action(arriving("a", [])) == Enter()
    assert next_action(arriving("a", ["b"], generation=5, members=("b",))) == Enter()


def test_the_first_generation_forms_when_as_many_are_there_as_it_may_have() -> None:
    bounds = Bounds(2, 3)
    assert next_action(arriving("a", "ab", bounds=bounds)) == Await()
    decision = Decision(1, ("b", "a", "c"), "b:1")
    assert proposed(arriving("a", "bac", bounds=bounds)) == decision
    assert proposed(arriving("c", "bacd", bounds=bounds)) == decision
    assert next_action(arriving("d", "bacd", bounds=bounds)) == Await()


def test_or_when_enough_are_there_and_nobody_comes() -> None:
    bounds = Bounds(2, 4)
    assert next_action(arriving("a", "a", bounds=bounds, quiet=True)) == Await(lacking=1)
    assert proposed(arriving("a", "ab", bounds=bounds, quiet=True)).members == ("a", "b")


def test_later_a_newcomer_waits_for_the_members() -> None:
    known = {"generation": 3, "members": ("x", "y"), "quiet": True}
    assert next_action(arriving("a", "ab", **known)) == Await()


# Reports ---------------------------------------------------------------------------------------


def test_a_member_reports_first_and_again_at_each_new_loss() -> None:
    assert next_action(member(1, [])) == WriteReport(report(1))
    view = member(1, [report(1), report(0)])
    assert next_action(view) == Await((2, 3))
    assert next_action(replace(view, lost=(2,))) == WriteReport(report(1, [2]))


def test_a_report_that_an_older_one_has_overwritten_is_written_again() -> None:
    view = member(1, [report(1)], lost=(2, 3))
    assert next_action(view) == WriteReport(report(1, [2, 3]))


def test_each_member_reports_or_is_lost_to_one_that_stays_before_one_proposes() -> None:
    reports = [report(0), report(1), report(3)]
    assert next_action(member(1, reports)) == Await((2,))
    for rank in (0, 1, 3):
        told = [replace(each, lost=(2,)) if each.rank == 0 else each for each in reports]
        assert proposed(member(rank, told)).survivors == (0, 1, 3)


def test_the_word_of_one_that_leaves_makes_nobody_lost() -> None:
    reports = [report(0, [2]), report(2, [0, 1])]
    assert next_action(member(0, reports)) == Await((1, 3))


def test_a_proposal_has_survivors_in_order_then_newcomers_and_what_they_begin_with() -> None:
    reports = [
        report(1, [0], newcomers=(newcomer("x"), newcomer("y"))),
        report(2, newcomers=(newcomer("y"), newcomer("d"), newcomer("z"))),
        report(3),
    ]
    members = ("b", "c", "d", "x", "y", "z")
    decision = Decision(4, members, "b:1", survivors=(1, 2, 3), lost=(0,), version=7, layout=3)
    assert proposed(member(3, reports)) == decision


def test_all_who_have_read_the_same_reports_propose_the_same() -> None:
    reports = [report(0, [2]), report(1, [2, 3]), report(3, [1])]
    views = [member(rank, reports) for rank in (0, 1)]
    assert proposed(views[0]) == proposed(views[1])
    assert next_action(member(3, reports)) == Await()


# Silence ---------------------------------------------------------------------------------------


def test_who_has_not_heard_another_that_stays_is_waited_for_and_all_reports_may_change() -> None:
    # The network ends between 0, 1 and 2, 3; only 0 and 2 have noticed, and not all of it.
    reports = [report(0, [2], silent=(3,)), report(1), report(2, [0]), report(3, silent=(0,))]
    for rank in (0, 1, 3):
        assert next_action(member(rank, reports)) == Await((0, 1, 2, 3))
    heard = [replace(each, silent=()) for each in reports]
    assert proposed(member(1, heard)).survivors == (0, 1, 3)
    lost = [report(0, [2, 3]), report(1), report(2, [0]), report(3, [0])]
    assert proposed(member(1, lost)).survivors == (1, 2, 3)


def test_silence_to_or_of_one_that_leaves_delays_nothing() -> None:
    reports = [report(0, [2, 3]), report(1, [2, 3], silent=(2,)), report(2, [0], silent=(1,))]
    assert proposed(member(0, reports)).survivors == (0, 1)


def test_a_report_says_silence_and_takes_it_back() -> None:
    silent = member(0, [report(0)], silent=(1,))
    assert next_action(silent) == WriteReport(report(0, silent=(1,)))
    heard = member(0, [report(0, silent=(1,))], silent=())
    assert next_action(heard) == WriteReport(report(0))


def cut_off(rank: int, others: Collection[int], held: Collection[int]) -> Report:
    """The report of one that hears nothing of these; it holds these of four parts of version 7."""
    return report(rank, others, silent=tuple(others), held=parts(7, held, 4))


def test_one_that_is_cut_off_does_not_end_a_job_that_the_others_can_go_on_with() -> None:
    alone = cut_off(0, (1, 2, 3), (0, 3))
    assert next_action(member(0, [alone])) == Await((0, 1, 2, 3))
    rest = [report(each, [0], held=parts(7, [each, each - 1], 4)) for each in (1, 2, 3)]
    assert proposed(member(2, rest)).survivors == (1, 2, 3)
    assert next_action(member(0, [alone, *rest])) == Await()


def test_if_only_all_together_have_a_complete_version_they_try_to_meet() -> None:
    halves = [cut_off(rank, (2, 3), (0, 1, 3)) for rank in (0, 1)]
    assert next_action(member(0, halves)) == Await((0, 1, 2, 3))
    halves += [cut_off(rank, (0, 1), (1, 2, 3)) for rank in (2, 3)]
    assert proposed(member(0, halves)).survivors == (0, 1, 2, 3)
    assert next_action(member(2, halves)) == Await()


def test_who_is_known_to_be_dead_is_not_waited_for() -> None:
    halves = [replace(cut_off(rank, (2, 3), (0, 1)), silent=(2,)) for rank in (0, 1)]
    assert next_action(member(0, halves)) == Await((0, 1, 2, 3))
    back = [*halves, cut_off(2, (0, 1), (2, 3))]
    assert proposed(member(0, back)).survivors == (0, 1, 2)
    dead = [replace(each, silent=()) for each in halves]
    assert proposed(member(0, dead)).version is None


def test_one_that_did_not_come_to_a_meeting_but_has_reported_is_not_taken_as_dead() -> None:
    """Rank 1 is cut off from the others, so 0 waited for both of them in vain. 3 is dead."""
    reports = [
        report(0, [1, 2, 3], silent=(1,), held=parts(7, (0, 3), 4)),
        report(1, [0, 2, 3], silent=(0, 2), held=parts(7, (0, 1), 4)),
        report(2, [1, 3], silent=(1,), held=parts(7, (2, 3), 4)),
    ]
    assert proposed(member(0, reports)).survivors == (0, 1, 2)


def test_those_who_hear_each_other_do_not_wait_until_one_that_is_cut_off_is_back() -> None:
    """As before, but they have its part, too. 0 has lost 2 only as that did not come to a meeting:
    it waited for 1 there.
    """
    reports = [
        report(0, [1, 2, 3], silent=(1,), held=parts(7, (0, 3), 4)),
        report(1, [0, 2, 3], silent=(0, 2), held=parts(7, (0, 1), 4)),
        report(2, [1, 3], silent=(1,), held=parts(7, (1, 2), 4)),
    ]
    assert proposed(member(0, reports)).survivors == (0, 2)


def test_what_those_who_are_cut_off_hold_is_not_waited_for_too_long() -> None:
    alone = cut_off(0, (1, 2, 3), (0, 3))
    decision = proposed(member(0, [alone], overdue=True))
    assert (decision.survivors, decision.version) == ((0,), None)


def test_who_has_waited_for_too_long_takes_the_silent_as_there() -> None:
    reports = [report(0, [3], silent=(1,)), report(1), report(2)]
    assert next_action(member(0, reports)) == Await((0, 1, 2, 3))
    assert proposed(member(0, reports, overdue=True)).survivors == (0, 1, 2)


# Who stays -------------------------------------------------------------------------------------


def stay(*lost: Collection[int]) -> list[int]:
    """Who stays, if rank n has lost the n-th of these."""
    return who_stays({rank: report(rank, each) for rank, each in enumerate(lost)})


def test_of_two_that_have_lost_each_other_the_lower_stays() -> None:
    assert stay([1], [0]) == [0]
    assert stay([], [2], [1]) == [0, 1]


def test_who_is_lost_to_another_leaves() -> None:
    assert stay([], [0]) == [1]
    assert stay([], [0], [], []) == [1, 2, 3]


def test_who_has_lost_one_that_stays_leaves() -> None:
    assert stay([], [0], [3], [1]) == [0, 2]


def test_a_stopped_rank_that_wakes_does_not_outdo_those_who_gave_it_up() -> None:
    assert stay([1, 2], [0], [0]) == [1, 2]


def test_of_two_halves_of_a_network_the_one_with_the_lowest_rank_stays() -> None:
    assert stay([2, 3], [2, 3], [0, 1], [0, 1]) == [0, 1]
    assert stay([1, 2], [0, 3], [0, 3], [1, 2]) == [0, 3]


def test_but_the_first_half_to_write_goes_on_if_it_has_not_heard_of_the_other() -> None:
    halves = [report(2, [0, 1]), report(3, [0, 1])]
    assert proposed(member(3, halves)).members == ("c", "d")
    halves = [report(0, [2, 3]), report(1, [2, 3])]
    assert proposed(member(0, halves)).members == ("a", "b")


losses = st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=6)


@given(losses)
def test_who_stays_has_lost_none_that_stays_and_no_more_could_stay(lost: list[set[int]]) -> None:
    lost = [each - {rank} for rank, each in enumerate(lost)]
    staying = stay(*lost)
    conflict = [[b in lost[a] or a in lost[b] for b in range(len(lost))] for a in range(len(lost))]
    assert staying
    assert not any(conflict[a][b] for a, b in combinations(staying, 2))
    assert all(any(conflict[a][b] for b in staying) for a in range(len(lost)) if a not in staying)


@given(losses, st.integers(0, 5))
def test_who_has_waited_for_too_long_proposes(lost: list[set[int]], rank: int) -> None:
    rank %= len(lost)
    reports = [report(each, ranks - {each}) for each, ranks in enumerate(lost)]
    view = member(rank, reports, size=6, overdue=True)
    assert rank in proposed(view).survivors


# The state that it begins with ------------------------------------------------------------------


def parts(version: int, which: Collection[int], of: int, layout: int = 3) -> tuple[HeldPart, ...]:
    return tuple(HeldPart(version, layout, part, of) for part in which)


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ([replica(7), replica(8)], (8, 3)),
        ([parts(7, [0], 2), parts(7, [1], 2)], (7, 3)),
        ([parts(8, [0], 2) + parts(7, [0], 2), parts(7, [1], 2)], (7, 3)),
        ([parts(7, [0, 1], 2) + parts(8, [1], 2), parts(8, [0], 2)], (8, 3)),
        ([parts(7, [0], 2), parts(7, [0], 2)], None),
        ([parts(7, [0, 1, 2], 3, layout=2), parts(7, [0], 2)], (7, 2)),
        ([parts(7, [0, 1, 2], 3, layout=2), parts(7, [0, 1], 2)], (7, 3)),
        ([(), replica(7)], (7, 3)),
        ([(), ()], None),
        ([], None),
    ],
)
def test_the_newest_version_with_all_its_parts_counts(
    held: list[tuple[HeldPart, ...]], newest: tuple[int, int] | None
) -> None:
    assert newest_complete([report(rank, held=each) for rank, each in enumerate(held)]) == newest


def test_what_only_those_hold_that_leave_does_not_count() -> None:
    reports = [report(0, [1]), report(1, held=replica(8))]
    assert proposed(member(0, reports, size=2)).version == 7


def test_a_proposal_without_a_complete_version_says_so() -> None:
    reports = [report(0, [1], held=parts(7, [0], 2))]
    decision = proposed(member(0, reports, size=2))
    assert (decision.version, decision.layout) == (None, 0)


# How many --------------------------------------------------------------------------------------


def test_too_few_wait_for_newcomers() -> None:
    alone = report(0, [1, 2])
    bounds = Bounds(3)
    assert next_action(member(0, [alone], size=3, bounds=bounds)) == Await(lacking=2)
    with_two = replace(alone, newcomers=(newcomer("x"), newcomer("y")))
    assert proposed(member(0, [with_two], size=3, bounds=bounds)).members == ("a", "x", "y")


def test_newcomers_beyond_the_most_stay_newcomers() -> None:
    reports = [report(0, newcomers=(newcomer("x"), newcomer("y"))), report(1)]
    view = member(0, reports, size=2, bounds=Bounds(1, 3))
    assert proposed(view).members == ("a", "b", "x")


def test_a_multiple_trains_and_the_others_stand_by() -> None:
    reports = [report(rank, [0], held=parts(7, [rank % 2], 2)) for rank in (1, 2, 3)]
    decision = proposed(member(3, reports, bounds=Bounds(2, 8, multiple=2)))
    assert (decision.survivors, decision.lost, decision.version) == ((1, 2), (0,), 7)


def test_who_holds_a_part_alone_does_not_stand_by() -> None:
    held = ([0], [0], [1])
    reports = [report(rank, [3], held=parts(7, each, 2)) for rank, each in enumerate(held)]
    decision = proposed(member(1, reports, bounds=Bounds(1, 8, multiple=2)))
    assert (decision.survivors, decision.version) == ((0, 2), 7)


def test_what_those_hold_who_stand_by_does_not_count() -> None:
    reports = [report(rank, [3], held=parts(7, [rank], 3)) for rank in range(3)]
    decision = proposed(member(0, reports, bounds=Bounds(1, 8, multiple=2)))
    assert (decision.survivors, decision.version) == ((0, 1), None)


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        (Bounds(), [0, 1, 2, 3, 4, 5]),
        (Bounds(2, 4), [0, 0, 2, 3, 4, 4]),
        (Bounds(1, 5, multiple=2), [0, 0, 2, 2, 4, 4]),
        (Bounds(3, 5, multiple=2), [0, 0, 0, 0, 4, 4]),
    ],
)
def test_a_generation_has_so_many_ranks(bounds: Bounds, sizes: list[int]) -> None:
    assert [bounds.size(available) for available in range(6)] == sizes


def test_the_lacking_are_those_to_the_next_possible_size() -> None:
    view = arriving("a", "ab", bounds=Bounds(3, 8, multiple=2))
    assert next_action(view) == Await(lacking=2)


# The decision ----------------------------------------------------------------------------------


def test_the_decision_goes_before_everything_else() -> None:
    decision = Decision(4, ("a", "x"), "a:1", (0,), (1, 2, 3), 7, 3)
    assert next_action(member(0, [], decision=decision)) == JoinGeneration(decision)
    assert next_action(member(1, [], decision=decision)) == StandBy(decision)
    known = {"generation": 3, "decision": decision}
    assert next_action(arriving("x", [], **known)) == JoinGeneration(decision)
    assert next_action(arriving("y", [], **known)) == StandBy(decision)


def test_newcomers_begin_anew_if_no_member_lives() -> None:
    known = {"generation": 3, "members": ("x", "y"), "deserted": True}
    decision = Decision(4, ("a", "b"), "a:1", lost=(0, 1))
    assert next_action(arriving("a", ["a", "b"], **known, quiet=True)) == Propose(decision)
    assert next_action(arriving("a", ["a", "b"], **known)) == Await()
    full = {**known, "bounds": Bounds(1, 2)}
    assert next_action(arriving("b", ["a", "b", "c"], **full)) == Propose(decision)
    assert next_action(arriving("c", ["a", "b", "c"], **full)) == Await()
    few = {**known, "bounds": Bounds(3), "quiet": True}
    assert next_action(arriving("a", ["a", "b"], **few)) == Await(lacking=1)


# The table of membership.py ---------------------------------------------------------------------

ANY = Decision(4, ("a",), "a:1")
OLDER = {"generation": 3, "members": ("x", "y", "z", "u")}
ROWS = {  # a member's knowledge, and a newcomer's
    "decision on g + 1, which has this process": (
        member(0, [], decision=ANY),
        arriving("a", [], **OLDER, decision=ANY),
    ),
    "decision on g + 1, which has it not": (
        member(1, [], decision=ANY),
        arriving("b", [], **OLDER, decision=ANY),
    ),
    "its own entry is not in the store, or is out of date": (
        member(0, [report(1)]),
        arriving("a", ["b"]),
    ),
    "it does not stay": (member(1, [report(0, [1]), report(1)]), None),
    "a member has neither reported nor is lost": (member(0, [report(0, [1, 2])]), None),
    "one that stays has not heard another for a while": (
        member(0, [report(0, [2, 3], silent=(1,)), report(1)]),
        None,
    ),
    "they lack a part that one cut off from them may have": (
        member(0, [report(0, [1, 2, 3], silent=(1,), held=())]),
        None,
    ),
    "fewer processes than `min_ranks`": (
        member(0, [report(0, [1, 2, 3])], bounds=Bounds(2)),
        arriving("a", ["a"], bounds=Bounds(2), quiet=True),
    ),
    "generation 0, newcomers still arrive": (None, arriving("a", ["a"])),
    "generation > 0, of which a member may live": (
        None,
        arriving("a", ["a"], **OLDER, quiet=True),
    ),
    "else": (member(0, [report(0, [1, 2, 3])]), arriving("a", ["a"], quiet=True)),
}
NAMES = {WriteReport: "REPORT", JoinGeneration: "JOIN", StandBy: "STAND BY"}


def test_the_table_says_what_happens() -> None:
    rows = re.search(r"knowledge +a member +a newcomer\n(.*?)\n\n", membership.__doc__, re.DOTALL)
    said = [re.split(r"  +", row.strip()) for row in rows[1].splitlines()]
    happens = [
        [
            NAMES.get(kind := type(next_action(view)), kind.__name__.upper()) if view else "."
            for view in views
        ]
        for views in ROWS.values()
    ]
    assert said == [[row, *each] for row, each in zip(ROWS, happens, strict=True)]
