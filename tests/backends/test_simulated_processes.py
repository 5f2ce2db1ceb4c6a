"""Simulated processes that crash, arrive, sleep, share a store, and form further groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx import Backend, CollectiveTimeoutError, DeadlockError, PeerLostError, simulate
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.transport.simulated import SimulatedBackend
from phalanx.transport.simulated_process import SimulatedProcess

ONES = torch.ones(2)


def process_of(backend: Backend) -> SimulatedProcess:
    assert isinstance(backend, SimulatedBackend)
    assert backend.process is not None
    return backend.process


# Crashes ------------------------------------------------------------------------------------


def reduce_until_broken(backend: Backend) -> tuple[int, int | None]:
    """How many of 4 collectives ended well, and who was blamed for the next."""
    for done in range(4):
        try:
            total = phalanx.all_reduce(ONES, backend, algorithm="ring")
        except PeerLostError as error:
            return done, error.peer
        assert total.tolist() == [backend.world_size] * 2
    return 4, None


@pytest.mark.parametrize("seed", range(3))
def test_a_process_can_crash_at_every_turn_of_its_own_and_only_there(seed: int) -> None:
    whole = simulate(reduce_until_broken, 3, seed)
    assert list(whole) == [(4, None)] * 3
    for process, turns in enumerate(whole.turns):
        for turn in range(turns):
            run = simulate(reduce_until_broken, 3, seed, crashes={process: turn})
            assert run[process] is None
            assert run.turns[process] == turn
            others = [result for rank, result in enumerate(run) if rank != process]
            # A rank whose part was done at the crash has its collective; then it learns of it.
            assert max(done for done, _ in others) - min(done for done, _ in others) <= 1
            assert all(blamed == process for done, blamed in others if done < 4)
        run = simulate(reduce_until_broken, 3, seed, crashes={process: turns})
        assert list(run) == list(whole)


def test_a_run_with_crashes_is_the_same_every_time() -> None:
    crashes = {2: 5, 0: 8}
    first = simulate(reduce_until_broken, 4, 7, crashes=crashes)
    for _ in range(3):
        again = simulate(reduce_until_broken, 4, 7, crashes=crashes)
        assert (list(again), again.turns) == (list(first), first.turns)


def test_what_a_crashed_process_does_while_its_code_unwinds_reaches_nobody() -> None:
    tried = []

    def clean_up(backend: Backend) -> None:
        process = process_of(backend)
        calls: list[Callable[[], object]] = [
            lambda: backend.send(b"!", 0),
            lambda: process.store.set("key", "from the dead"),
            lambda: process.sleep(1.0),
            lambda: process.form("group", 0, 1, seconds=1.0),
            backend.barrier,
            backend.close,
        ]
        for call in calls:
            try:
                call()
            except BaseException as error:
                tried.append(type(error).__name__)

    def run(backend: Backend) -> object:
        process = process_of(backend)
        if backend.rank == 0:
            with pytest.raises(PeerLostError, match="its process has crashed"):
                backend.recv(bytearray(1), 1)
            process.sleep(9.0)
            return process.store.check(["key"])
        try:
            process.sleep(1.0)
        finally:
            clean_up(backend)
            raise KeyError("in the end")

    assert simulate(run, 2, crashes={1: 1}) == [False, None]
    assert tried == ["MisuseError", *["RankStopped"] * 3, "MisuseError"]


def test_the_groups_of_a_process_are_all_broken_by_its_crash() -> None:
    def run(backend: Backend) -> list[int | None]:
        blamed = []
        groups = [backend.subgroup([0, 1, 2])]
        if backend.rank > 0:
            groups.append(backend.subgroup([1, 2]))
        if backend.rank == 1:
            process_of(backend).sleep(1.0)
        for group in [backend, *groups]:
            with pytest.raises(PeerLostError) as info:
                group.recv(bytearray(1), group.ranks.index(1))
            blamed.append(info.value.peer)
        assert list(backend.lost()) == [1]
        return blamed

    assert simulate(run, 3, crashes={1: 1}) == [[1, 1], None, [1, 1, 0]]


def test_a_rank_that_fails_by_the_crash_raises_and_one_that_crashed_does_not() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 1:
            backend.recv(bytearray(1), 0)
        try:
            process_of(backend).sleep(1.0)
        except BaseException:
            raise KeyError("the crashed one's") from None

    with pytest.raises(PeerLostError):
        simulate(run, 3, crashes={0: 1})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"crashes": {3: 0}}, r"crashes=\{3: 0\}\): processes are 0 to 2"),
        ({"crashes": {-1: 0}}, "processes are 0 to 2"),
        ({"crashes": {0: -1}}, "count from 0"),
        ({"arrivals": [-1]}, r"arrivals=\[-1\]\): turns count from 0"),
    ],
)
def test_a_crash_or_an_arrival_that_cannot_be_is_refused(
    options: dict[str, dict[int, int] | list[int]], told: str
) -> None:
    options.setdefault("arrivals", [4])
    with pytest.raises(ValueError, match=told):
        simulate(lambda backend: None, 2, **options)  # type: ignore[arg-type]


# The clock and the store --------------------------------------------------------------------


def test_the_clock_jumps_to_the_end_of_the_first_sleep_when_nobody_can_go_on() -> None:
    woken: list[tuple[int, float]] = []

    def run(backend: Backend) -> None:
        process = process_of(backend)
        for _ in range(2):
            process.sleep(10.0 * (3 - process.number))
            woken.append((process.number, process.now()))

    simulate(run, 3)
    assert woken[:3] == [(2, 10), (1, 20), (2, 20)] or woken[:3] == [(2, 10), (2, 20), (1, 20)]
    assert woken[3:] == [(0, 30), (1, 40), (0, 60)]


def test_who_waits_for_the_store_sleeps_until_it_changes() -> None:
    def run(backend: Backend) -> float:
        process = process_of(backend)
        if process.number == 0:
            process.sleep(5.0)
            process.store.set("key", "value")
        else:
            process.store.wait_for_change(60.0)
            assert process.store.get("key") == b"value"
        before = process.now()
        process.store.wait_for_change(2.0)
        assert process.now() == before + 2.0
        return before

    assert simulate(run, 2) == [5, 5]


@settings(max_examples=examples(20))
@given(st.integers(0, 1000), st.integers(2, 5))
def test_one_of_those_who_compare_and_set_wins_and_all_learn_who(seed: int, size: int) -> None:
    def run(backend: Backend) -> bytes:
        return process_of(backend).store.compare_set("key", "", str(backend.rank))

    winners = set(simulate(run, size, seed))
    assert len(winners) == 1


def test_compare_set_does_as_that_of_torch() -> None:
    def calls(store: object) -> list[object]:
        compare_set = store.compare_set  # type: ignore[attr-defined]
        return [
            compare_set("key", "expected", "first"),
            store.check(["key"]),  # type: ignore[attr-defined]
            compare_set("key", "", "first"),
            compare_set("key", "other", "second"),
            compare_set("key", "first", "second"),
            store.get("key"),  # type: ignore[attr-defined]
        ]

    (ours,) = simulate(lambda backend: calls(process_of(backend).store), 1)
    assert ours == calls(torch.distributed.HashStore())


def test_ranks_that_wait_for_each_other_are_told_though_another_one_goes_on_sleeping() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            while not process_of(backend).store.check(["over"]):
                process_of(backend).sleep(1.0)
            return
        with pytest.raises(DeadlockError, match="rank 1 waits for 2"):
            backend.recv(bytearray(1), 3 - backend.rank)
        process_of(backend).store.set("over", "")

    simulate(run, 3)


# Further groups and arrivals ----------------------------------------------------------------


def reduce_for_ever(backend: Backend) -> None:
    while True:
        phalanx.all_reduce(ONES, backend)


def test_survivors_form_the_next_group_and_those_who_come_are_in_it() -> None:
    def run(backend: Backend) -> tuple[int, int]:
        process = process_of(backend)
        one = ReplaceableBackend(backend)
        if process.number < 3:
            with pytest.raises(PeerLostError):
                reduce_for_ever(one)
        rank = {0: 0, 2: 1, 3: 2}[process.number]
        one.enter(process.form("second", rank, 3, seconds=5.0))
        assert phalanx.all_reduce(ONES, one).tolist() == [3, 3]
        return one.rank, one.world_size

    run_ = simulate(run, 3, crashes={1: 6}, arrivals=[10])
    assert list(run_) == [(0, 3), None, (1, 3), (2, 3)]


def test_a_group_that_somebody_does_not_come_to_is_given_up_by_all() -> None:
    def run(backend: Backend) -> Sequence[object]:
        process = process_of(backend)
        with pytest.raises(
            CollectiveTimeoutError, match=r"ranks \[2\] did not come within 5 s"
        ) as e:
            process.form("second", process.number, 3, seconds=5.0)
        return e.value.peer, process.now()

    assert simulate(run, 2) == [(2, 5), (2, 5)]


def test_a_process_arrives_at_its_turn_or_when_all_others_wait() -> None:
    def run(backend: Backend) -> object:
        process = process_of(backend)
        group = process.form("all", process.number, 4, seconds=60.0)
        group.barrier()
        return backend.world_size, group.world_size

    assert simulate(run, 2, arrivals=[3, 1]) == [(2, 4), (2, 4), (1, 4), (1, 4)]


def test_who_would_come_after_all_have_returned_does_not_come() -> None:
    run = simulate(lambda backend: backend.world_size, 2, arrivals=[10_000])
    assert list(run) == [2, 2, None]
    assert run.turns == [1, 1, 0]
