"""The checker finds what is wrong with a schedule: without this its proofs prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checker import (
    BrokenScheduleError,
    State,
    assert_rounds_leave_memory_in_peace,
    run,
)
from schedule_proof import ROWS, assert_goal, start

from phalanx.collectives.schedules import (
    COLLECTIVES,
    Combine,
    Recv,
    Round,
    Schedule,
    ScheduleFunction,
    Send,
    Step,
)
from phalanx.collectives.schedules.linear import direct_broadcast, ring_all_gather, star_reduce
from phalanx.collectives.schedules.steps import rooted, sparing, then
from phalanx.collectives.schedules.tree import tree_reduce


def script(*ranks: list[Round]) -> ScheduleFunction:
    """A schedule that is written down, rank by rank."""
    return lambda rank, size: iter(ranks[rank])


def own(size: int, chunks: int = 1) -> State:
    return start("all_reduce", size, chunks)


def test_a_contribution_that_comes_twice() -> None:
    twice = then(tree_reduce, tree_reduce)
    with pytest.raises(
        BrokenScheduleError, match=r"round 1, rank 0, chunk 0: .* of ranks \[1\] twice"
    ):
        run(twice, own(2))


def test_a_contribution_that_comes_twice_in_one_round() -> None:
    twice = script([(Combine(1, 0), Combine(1, 0))], [(Send(0, 0), Send(0, 0))])
    with pytest.raises(BrokenScheduleError, match=r"of ranks \[1\] twice"):
        run(twice, own(2))


def test_a_contribution_that_is_lost() -> None:
    overwritten = script([(Send(1, 0),), (Recv(1, 0),)], [(Recv(0, 0),), (Send(0, 0),)])
    with pytest.raises(AssertionError, match="rank 0"):
        assert_goal("all_reduce", run(overwritten, own(2)).state)


def test_a_deadlock_and_who_waits_for_whom() -> None:
    circle = script(
        [(Recv(1, 0),), (Send(1, 0),)],
        [(Recv(2, 0),), (Send(0, 0),)],
        [(), (Recv(0, 0),), (Send(1, 0),)],
    )
    with pytest.raises(BrokenScheduleError) as caught:
        run(circle, own(3))
    assert str(caught.value) == (
        "deadlock: rank 0 waits for rank 1 in round 0, Recv(peer=1, chunk=0, count=1); "
        "rank 1 waits for rank 2 in round 0, Recv(peer=2, chunk=0, count=1); "
        "rank 2 waits for rank 0 in round 1, Recv(peer=0, chunk=0, count=1)"
    )


def test_a_rank_that_waits_for_one_that_is_done() -> None:
    with pytest.raises(BrokenScheduleError, match="deadlock: rank 0 waits for rank 1"):
        run(script([(Recv(1, 0),)], []), own(2))


def test_a_message_that_nobody_takes() -> None:
    with pytest.raises(
        BrokenScheduleError, match=r"rank 1 never took rank 0's Send\(.*\) of round 0"
    ):
        run(script([(Send(1, 0),)], []), own(2))


@pytest.mark.parametrize("expected", [Recv(0, 1, 2), Recv(0, 0, 1), Combine(0, 0, 1)])
def test_a_message_that_is_not_what_its_receiver_expects(expected: Step) -> None:
    with pytest.raises(BrokenScheduleError, match=r"rank 1: .* met rank 0's Send"):
        run(script([(Send(1, 0, 2),)], [(expected,)]), own(2, 3))


def test_messages_between_two_ranks_arrive_in_the_order_sent() -> None:
    crossed = script([(Send(1, 0), Send(1, 1))], [(Recv(0, 1), Recv(0, 0))])
    with pytest.raises(BrokenScheduleError, match=r"Recv\(.*chunk=1.* met .*Send\(.*chunk=0"):
        run(crossed, own(2, 2))


def test_a_message_carries_what_was_there_before_the_round() -> None:
    swap = script([(Recv(1, 0), Send(1, 0))], [(Recv(0, 0), Send(0, 0))])
    assert run(swap, own(2)).state == [[2], [1]]


@pytest.mark.parametrize(
    "step", [Send(0, 0), Send(2, 0), Recv(-1, 0), Send(1, 1), Send(1, -1), Recv(1, 0, 2)]
)
def test_peers_and_chunks_that_do_not_exist(step: Step) -> None:
    with pytest.raises(BrokenScheduleError, match=r"has no such (peer|chunk)"):
        run(script([(step,)], []), own(2))


@pytest.mark.parametrize("kind", [Recv, Combine])
def test_memory_that_nobody_has_written(kind: Callable[[int, int], Step]) -> None:
    with pytest.raises(BrokenScheduleError, match="what was never written"):
        run(script([(Send(1, 0),)], [(kind(0, 0),)]), [[int(kind is Combine)], [0]])


def test_a_message_that_is_received_in_another_round_is_counted() -> None:
    late = script([(Send(1, 0),)], [(), (Recv(0, 0),)])
    assert run(late, own(2)).stray == {"round 0 -> 1": 1}


@pytest.mark.parametrize(
    "steps",
    [
        (Send(1, 0, 3), Recv(1, 2)),
        (Send(1, 0), Combine(1, 0)),
        (Recv(1, 0, 2), Recv(1, 1)),
        (Recv(1, 0), Combine(1, 0)),
    ],
)
def test_a_round_that_uses_memory_twice(steps: Round) -> None:
    with pytest.raises(BrokenScheduleError, match=r"round 0, rank 0: chunks \[\d\] are in use"):
        assert_rounds_leave_memory_in_peace(script([steps], []), 2)


@settings(deadline=None)  # a busy machine is no bug
@given(st.sampled_from(ROWS), st.integers(2, 9), st.data())
def test_no_single_step_of_any_algorithm_can_be_changed_unnoticed(
    row: tuple[str, str], size: int, data: st.DataObject
) -> None:
    collective, algorithm = row
    algorithms = COLLECTIVES[collective][algorithm]
    ranks = [list(algorithms.schedule(rank, size)) for rank in range(size)]
    places = [
        (rank, number, index)
        for rank, rounds in enumerate(ranks)
        for number, steps in enumerate(rounds)
        for index in range(len(steps))
    ]
    rank, number, index = data.draw(st.sampled_from(places))
    steps = list(ranks[rank][number])
    step = steps[index]
    changes = [[], [step, step], [step._replace(peer=(step.peer + 1) % size)]]
    changes += [[step._replace(chunk=step.chunk + 1)], [step._replace(count=step.count + 1)]]
    changes += [[kind(*step)] for kind in (Send, Recv, Combine) if kind is not type(step)]
    steps[index : index + 1] = data.draw(st.sampled_from(changes))
    ranks[rank][number] = tuple(steps)
    chunks = algorithms.chunks(size)
    with pytest.raises(AssertionError):
        assert_goal(collective, run(script(*ranks), start(collective, size, chunks)).state)


def test_rooted_renumbers_ranks_in_a_circle_and_leaves_chunks_alone() -> None:
    assert list(rooted(star_reduce, 2)(2, 3)) == [(Combine(0, 0), Combine(1, 0))]
    assert list(rooted(star_reduce, 2)(1, 3)) == [(Send(2, 0),)]
    assert run(rooted(tree_reduce, 2), own(3)).state[2] == [0b111]


def test_sparing_leaves_out_what_a_rank_has_already() -> None:
    spared = sparing(ring_all_gather, 0)
    assert run(spared, [[1, 2, 4], [0, 2, 0], [0, 0, 4]]).received == [0, 2, 2]
    assert run(direct_broadcast, [[1] * 3, [0] * 3, [0] * 3]).received == [0, 3, 3]


def test_then_is_one_after_the_other() -> None:
    def one(rank: int, size: int) -> Schedule:
        yield (Send(1, 0),)

    def other(rank: int, size: int) -> Schedule:
        yield ()

    assert list(then(one, other)(0, 2)) == [(Send(1, 0),), ()]
