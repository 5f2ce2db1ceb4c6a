"""Windows: all meet, nobody is more than one ahead, and whoever does something else is seen."""

from __future__ import annotations

import threading
from random import Random

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_neighbours import make_window, neighbours

from phalanx.transport.shm.control import FLAG, Meet, Shown, Window
from phalanx.transport.shm.domain import USED, Commons


def windows_of(commons: list[Commons], ident: int = 0) -> list[Window]:
    return [make_window(commons, rank, ident) for rank in range(len(commons))]


def show(window: Window, turn: int, value: int) -> None:
    window.mine.slot(turn, 100, torch.int64).fill_(value)


def sees(window: Window, turn: int, value: int) -> bool:
    slots = [window.pane(place).slot(turn, 100, torch.int64) for place in range(window.size)]
    return all(bool((slot == value).all()) for slot in slots)


@settings(max_examples=examples(60))
@given(st.integers(2, 4), st.lists(st.integers(0, 3), max_size=80), st.integers(0, 2**16))
def test_nobody_passes_a_meeting_before_all_have_come_and_then_sees_what_all_have_shown(
    size: int, order: list[int], seed: int
) -> None:
    random = Random(seed)
    meetings = 12
    with neighbours(size) as commons:
        windows: list[Window | None] = [None] * size
        meets: list[Meet | None] = [None] * size
        done = [0] * size
        order = list(order)
        while min(done) < meetings:
            rank = order.pop() % size if order else random.randrange(size)
            window, meet = windows[rank], meets[rank]
            if done[rank] == meetings:
                continue
            if window is None:  # some make the group when others have come to its first meeting
                windows[rank] = make_window(commons, rank)
                continue
            if meet is None:
                meets[rank] = meet = Meet(window, first=True)
                show(window, 1 - window.turn, done[rank])
                meet.begin(done[rank])
                meet.begin(done[rank])  # again: nothing
            came = [other is not None and other.words[FLAG] > done[rank] for other in windows]
            assert meet.stranger() is None
            assert meet.absent() == [r for r in range(size) if not came[r]]
            assert meet.spin() == all(came)
            if all(came):
                assert sees(window, window.turn, done[rank])
                meets[rank] = None
                done[rank] += 1
            flags = [other.words[FLAG] if other is not None else 0 for other in windows]
            assert max(flags) - min(flags) <= 1


def test_threads_that_run_freely_see_what_was_shown() -> None:
    size, meetings = 3, 50
    wrong: list[str] = []
    with neighbours(size) as commons:
        windows = windows_of(commons)

        def attend(window: Window) -> None:
            for number in range(meetings):
                meet = Meet(window, first=True)
                show(window, 1 - window.turn, number)
                meet.begin(number)
                while not meet.spin():
                    pass
                if not sees(window, window.turn, number):
                    wrong.append(f"#{number}")

        threads = [threading.Thread(target=attend, args=(window,)) for window in windows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_whoever_comes_by_another_trail_is_found_by_all_in_whatever_order_they_come(
    before: int, size: int
) -> None:
    random = Random(before)
    for odd in range(size):
        with neighbours(size) as commons:
            windows = windows_of(commons)
            for number in range(before):
                meets = [Meet(window, first=True) for window in windows]
                for meet in meets:
                    meet.begin(number)
                assert all(meet.spin() for meet in meets)
            meets = [Meet(window, first=True) for window in windows]
            order = random.sample(range(size), size)
            for rank in order:
                meets[rank].begin(1000 if rank == odd else before)
            for rank, meet in enumerate(meets):
                assert not meet.spin()
                assert meet.absent() == []
                assert (meet.stranger() == odd) if rank != odd else (meet.stranger() != odd)
                assert meet.stranger() is not None


def test_one_that_is_a_meeting_ahead_is_no_stranger() -> None:
    """It has begun what comes next, which is something else."""
    with neighbours(2) as commons:
        first, second = windows_of(commons)
        meets = Meet(first, first=True), Meet(second, first=True)
        for meet in meets:
            meet.begin(1)
        assert meets[0].spin()
        ahead = Meet(first, first=True, shown=Shown((1, 2), (3, 4)))
        ahead.begin(2)
        assert meets[1].stranger() is None
        assert meets[1].spin()
        assert not ahead.spin()
        assert ahead.stranger() is None


def test_a_meeting_inside_a_collective_asks_nobody_what_he_does() -> None:
    with neighbours(2) as commons:
        meets = [Meet(window) for window in windows_of(commons)]
        meets[0].begin(1)
        meets[1].begin(2)
        assert all(meet.spin() and meet.stranger() is None for meet in meets)


def test_what_is_shown_is_found_where_it_lies() -> None:
    with neighbours(2) as commons:
        windows = windows_of(commons)
        tensors = [
            one.arena.empty((1000,), torch.int32).fill_(7 + r) for r, one in enumerate(commons)
        ]
        for window, tensor in zip(windows, tensors, strict=True):
            where = window.find(tensor.data_ptr(), tensor.nbytes)
            assert where is not None
            Meet(window, first=True, shown=Shown(where, where)).begin(1)
            assert windows[0].find(tensors[1].data_ptr(), 1) is None  # of another rank
        for window, peer in ((windows[0], 1), (windows[1], 0)):
            assert window.spin(1)
            pane = window.pane(peer)
            assert pane.shown(window.turn)
            assert pane.given_address(window.turn) == pane.result_address(window.turn)
            assert pane.given_address(window.turn) != tensors[peer].data_ptr()  # mapped once more
            assert not pane.shown(1 - window.turn)


def test_windows_are_used_again_only_when_all_members_have_closed_the_group() -> None:
    with neighbours(3) as commons:
        old = windows_of(commons, 1)
        for meet in [Meet(window, first=True) for window in old]:
            meet.begin(1)
        places = [window.mine.slot_address(0) for window in old]
        for closed in range(3):
            fresh = make_window(commons, 0, ident=10 + closed)
            assert fresh.mine.slot_address(0) not in places
            assert old[2 - closed].words[FLAG] == 1
            assert commons[1].neighbours[0].pane(1) is not None
            old[closed].close()
        again = make_window(commons, 0, ident=20)
        assert again.mine.slot_address(0) == places[0]
        assert again.words[FLAG] == 0, "the flag of another group"
        assert commons[1].neighbours[0].pane(1) is None


@pytest.mark.parametrize("staged", [False, True])
def test_many_groups_one_after_the_other_take_no_more_memory_than_two(staged: bool) -> None:
    with neighbours(3) as commons:
        for ident in range(1, 201):
            windows = windows_of(commons, ident)
            for window in windows:
                if staged:
                    window.make_stage()
                meet = Meet(window, first=True)
                meet.begin(1)
            for rank in range(3):
                windows[(ident + rank) % 3].close()
        for one in commons:
            assert len(one.arena.segments) == 1
            assert one.ledger.words[USED] <= 3


def test_a_group_that_only_some_have_made_is_given_back_when_these_have_closed_it() -> None:
    """The others learn over the connections that they are too late."""
    with neighbours(2) as commons:
        make_window(commons, 0, ident=1).close()
        make_window(commons, 0, ident=2)
        late = Meet(make_window(commons, 1, ident=1), first=True)
        late.begin(1)
        assert late.absent() == [0]
        assert not late.spin()


def test_what_was_shown_is_found_when_its_owner_has_ended_however_many_groups_there_are() -> None:
    """Neighbours attach a rank's first segment when they meet: there windows have to be."""
    with neighbours(2) as commons:
        for ident in range(1, 41):
            for window in windows_of(commons, ident):
                window.make_stage()
        last = windows_of(commons, 50)
        last[0].make_stage()
        last[0].mine.slot(1, 1, torch.int64).fill_(42)
        for window in last:
            Meet(window, first=True).begin(1)
        commons[0].arena.close()  # as when its process ends
        assert last[1].spin(1)
        assert last[1].pane(0).slot(1, 1, torch.int64).item() == 42
        assert last[1].pane(0).stage_address
