"""Control blocks: nobody is more than one epoch ahead, and who does something else is seen."""

from __future__ import annotations

import threading
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_peers import local_peers, make_control

from phalanx.core.call import Call
from phalanx.core.shared_group import Descriptors
from phalanx.transport.shm.control import ControlBlock
from phalanx.transport.shm.directory import USED
from phalanx.transport.shm.domain import HostDomain
from phalanx.transport.shm.epoch import FlagWait, ShmEpoch
from phalanx.transport.shm.peer_slot import FLAG, peer_slot


def asked(rolling_hash: int) -> Call:
    """A call of a group that was asked to do what this stands for."""
    return cast("Call", SimpleNamespace(rolling_hash=rolling_hash))


def controls_of(domain: list[HostDomain], ident: int = 0) -> list[ControlBlock]:
    return [make_control(domain, rank, ident) for rank in range(len(domain))]


def show(control: ControlBlock, value: int) -> None:
    control.mine.slot(value % 2, 100, torch.int64).fill_(value)


def sees(control: ControlBlock, value: int) -> bool:
    slots = [control.slot(place, value % 2, 100, torch.int64) for place in range(control.size)]
    return all(bool((slot == value).all()) for slot in slots)


@settings(max_examples=examples(60))
@given(st.integers(2, 4), st.lists(st.integers(0, 3), max_size=80), st.integers(0, 2**16))
def test_no_rank_passes_an_epoch_before_all_have_arrived_and_then_sees_what_all_have_shown(
    size: int, order: list[int], seed: int
) -> None:
    random = Random(seed)
    count = 12
    with local_peers(size) as domain:
        controls: list[ControlBlock | None] = [None] * size
        epochs: list[ShmEpoch | None] = [None] * size
        done = [0] * size
        order = list(order)
        while min(done) < count:
            rank = order.pop() % size if order else random.randrange(size)
            control, epoch = controls[rank], epochs[rank]
            if done[rank] == count:
                continue
            if control is None:  # some make the group when others have come to its first epoch
                controls[rank] = make_control(domain, rank)
                continue
            if epoch is None:
                epochs[rank] = epoch = ShmEpoch(control, first=True)
                show(control, done[rank])
                epoch.begin(asked(done[rank]))
                epoch.begin(asked(done[rank]))  # again: nothing
            came = [other is not None and other.words[FLAG] > done[rank] for other in controls]
            assert epoch.diverged() is None
            assert epoch.waits_for() == [r for r in range(size) if not came[r]]
            assert epoch.ready(spin=1.0) == all(came)
            if all(came):
                assert sees(control, done[rank])
                epochs[rank] = None
                done[rank] += 1
            flags = [other.words[FLAG] if other is not None else 0 for other in controls]
            assert max(flags) - min(flags) <= 1


def test_threads_that_run_freely_see_what_was_shown() -> None:
    size, epochs = 3, 50
    wrong: list[str] = []
    with local_peers(size) as domain:
        controls = controls_of(domain)

        def attend(control: ControlBlock) -> None:
            for number in range(epochs):
                epoch = ShmEpoch(control, first=True)
                show(control, number)
                epoch.begin(asked(number))
                while not epoch.ready(spin=1.0):
                    pass
                if not sees(control, number):
                    wrong.append(f"#{number}")

        threads = [threading.Thread(target=attend, args=(control,)) for control in controls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_rank_with_another_rolling_hash_is_found_by_all_in_whatever_order_they_arrive(
    before: int, size: int
) -> None:
    random = Random(before)
    for odd in range(size):
        with local_peers(size) as domain:
            controls = controls_of(domain)
            for number in range(before):
                epochs = [ShmEpoch(control, first=True) for control in controls]
                for epoch in epochs:
                    epoch.begin(asked(number))
                assert all(epoch.ready(spin=1.0) for epoch in epochs)
            epochs = [ShmEpoch(control, first=True) for control in controls]
            order = random.sample(range(size), size)
            for rank in order:
                epochs[rank].begin(asked(1000 if rank == odd else before))
            for rank, epoch in enumerate(epochs):
                assert not epoch.ready(spin=1.0)
                assert epoch.waits_for() == []
                assert (epoch.diverged() == odd) if rank != odd else (epoch.diverged() != odd)
                assert epoch.diverged() is not None


def test_a_rank_that_is_an_epoch_ahead_has_not_diverged() -> None:
    """It has begun what comes next, which is something else."""
    with local_peers(2) as domain:
        first, second = controls_of(domain)
        epochs = ShmEpoch(first, first=True), ShmEpoch(second, first=True)
        for epoch in epochs:
            epoch.begin(asked(1))
        assert epochs[0].ready(spin=1.0)
        ahead = ShmEpoch(first, first=True, shown=Descriptors((1, 2), (3, 4)))
        ahead.begin(asked(2))
        assert epochs[1].diverged() is None
        assert epochs[1].ready(spin=1.0)
        assert not ahead.ready(spin=1.0)
        assert ahead.diverged() is None


def test_an_epoch_inside_a_collective_compares_no_rolling_hash() -> None:
    with local_peers(2) as domain:
        epochs = [ShmEpoch(control) for control in controls_of(domain)]
        epochs[0].begin(asked(1))
        epochs[1].begin(asked(2))
        assert all(epoch.ready(spin=1.0) and epoch.diverged() is None for epoch in epochs)


def test_what_is_shown_is_found_where_it_lies() -> None:
    with local_peers(2) as domain:
        controls = controls_of(domain)
        tensors = [
            one.arena.empty((1000,), torch.int32).fill_(7 + r) for r, one in enumerate(domain)
        ]
        for control, tensor in zip(controls, tensors, strict=True):
            where = control.find(tensor.data_ptr(), tensor.nbytes)
            assert where is not None
            ShmEpoch(control, first=True, shown=Descriptors(where, where)).begin(asked(1))
            assert controls[0].find(tensors[1].data_ptr(), 1) is None  # of another rank
        for control, peer in ((controls[0], 1), (controls[1], 0)):
            assert FlagWait(control, 1).ready(spin=1.0)
            shown = control.shown(peer)
            assert shown is not None
            given, result = shown
            assert given == result
            assert given != (tensors[peer].data_ptr(), None)  # mapped once more


def test_what_is_not_wholly_in_the_arena_is_not_found() -> None:
    with local_peers(2) as domain:
        first, second = controls_of(domain)
        tensor = domain[0].arena.empty((1000,), torch.uint8)
        segment = domain[0].arena.segments[1]
        end = segment.start + segment.size
        assert first.find(tensor[7:].data_ptr(), 993) == (1, tensor.data_ptr() + 7 - segment.start)
        assert first.find(end - 10, 10) == (1, segment.size - 10)
        assert first.find(end - 10, 11) is None
        assert first.find(segment.start - 1, 2) is None
        assert first.find(torch.ones(100).data_ptr(), 400) is None
        assert second.find(tensor.data_ptr(), 10) is None


def test_control_blocks_are_used_again_only_when_all_members_have_closed_the_group() -> None:
    with local_peers(3) as domain:
        old = controls_of(domain, 1)
        for epoch in [ShmEpoch(control, first=True) for control in old]:
            epoch.begin(asked(1))
        places = [control.mine.slot_address(0) for control in old]
        for closed in range(3):
            fresh = make_control(domain, 0, ident=10 + closed)
            assert fresh.mine.slot_address(0) not in places
            assert old[2 - closed].words[FLAG] == 1
            assert peer_slot(domain[1].local_peers[0], 1) is not None
            old[closed].close()
        again = make_control(domain, 0, ident=20)
        assert again.mine.slot_address(0) == places[0]
        assert again.words[FLAG] == 0, "the flag of another group"
        assert peer_slot(domain[1].local_peers[0], 1) is None


@pytest.mark.parametrize("staged", [False, True])
def test_many_groups_one_after_the_other_take_no_more_memory_than_two(staged: bool) -> None:
    with local_peers(3) as domain:
        for ident in range(1, 201):
            controls = controls_of(domain, ident)
            for control in controls:
                if staged:
                    control.wait_for_part(ahead=False)
                epoch = ShmEpoch(control, first=True)
                epoch.begin(asked(1))
            for rank in range(3):
                controls[(ident + rank) % 3].close()
        for one in domain:
            assert len(one.arena.segments) == 1
            assert one.directory.words[USED] <= 3


def test_a_group_that_only_some_have_made_is_given_back_when_these_have_closed_it() -> None:
    """The others learn over the connections that they are too late."""
    with local_peers(2) as domain:
        make_control(domain, 0, ident=1).close()
        make_control(domain, 0, ident=2)
        late = ShmEpoch(make_control(domain, 1, ident=1), first=True)
        late.begin(asked(1))
        assert late.waits_for() == [0]
        assert not late.ready(spin=1.0)


def test_what_was_shown_is_found_when_its_owner_has_ended_however_many_groups_there_are() -> None:
    """Local peers attach a rank's first segment when they meet: there control blocks have to be."""
    with local_peers(2) as domain:
        for ident in range(1, 41):
            for control in controls_of(domain, ident):
                control.wait_for_part(ahead=False)
        last = controls_of(domain, 50)
        last[0].wait_for_part(ahead=False)
        last[0].mine.slot(1, 1, torch.int64).fill_(42)
        for control in last:
            ShmEpoch(control, first=True).begin(asked(1))
        domain[0].arena.close()  # as when its process ends
        assert FlagWait(last[1], 1).ready(spin=1.0)
        assert last[1].slot(0, 1, 1, torch.int64).item() == 42
        assert last[1].stage_address(0)
