"""`phalanx.simulate`: a deadlock is seen when it happens, and an error stops the other ranks."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import pytest
import torch

import phalanx
from phalanx import (
    Backend,
    DeadlockError,
    MisuseError,
    PeerLostError,
    RankStopped,
    SimulatedBackend,
    simulate,
)

# Deadlocks ----------------------------------------------------------------------------------


def test_a_circle_of_receives_is_a_deadlock_that_says_who_waits_for_whom() -> None:
    def run(backend: Backend) -> None:
        backend.recv(bytearray(1), (backend.rank + 1) % 3, tag=4)

    with pytest.raises(DeadlockError) as info:
        simulate(run, 3, timeout=0.001)  # timeouts play no part
    for rank in range(3):
        assert f"rank {rank} waits for {(rank + 1) % 3} in recv #0 (tag 4)" in str(info.value)
    error = info.value
    assert (error.peer, error.op, error.sequence) == ((error.rank + 1) % 3, "recv", 0)


def test_every_rank_gets_the_deadlock_and_may_go_on_from_it() -> None:
    def run(backend: Backend) -> tuple[int | None, int | None]:
        other = 1 - backend.rank
        with pytest.raises(DeadlockError) as info:
            backend.recv(bytearray(1), other)
        into = bytearray(1)
        backend.sendrecv(b"x", other, into, other)
        assert into == b"x"
        return info.value.rank, info.value.peer

    assert simulate(run, 2) == [(0, 1), (1, 0)]


def test_waiting_for_a_rank_that_has_returned_is_a_deadlock() -> None:
    def run(backend: Backend) -> None:
        if backend.rank:
            phalanx.all_reduce(torch.ones(3), backend, algorithm="star")

    with pytest.raises(DeadlockError) as info:
        simulate(run, 3)
    assert "waits for 0 (which has returned) in all_reduce #0 (float32 [3], sum" in str(info.value)


@pytest.mark.parametrize("seed", range(5))
def test_a_collective_that_one_rank_skips_is_a_deadlock(seed: int) -> None:
    def run(backend: Backend) -> None:
        backend.barrier()
        if backend.rank == 2:
            backend.recv(bytearray(1), 0)
        else:
            backend.barrier()

    with pytest.raises(DeadlockError, match=r"rank 2 waits for 0 in recv #0") as info:
        simulate(run, 4, seed)
    assert "in barrier #1" in str(info.value)


def test_a_deadlock_across_subgroups_is_told_in_numbers_of_the_job() -> None:
    def run(backend: Backend) -> None:
        members = {0: [0, 1], 1: [1, 2], 2: [0, 2]}[backend.rank]
        backend.subgroup(members).barrier()

    with pytest.raises(DeadlockError, match=r"group of ranks \[1, 2\]") as info:
        simulate(run, 3)
    assert "rank 1 waits for 2 in barrier #0 in the group of ranks [1, 2]" in str(info.value)


def test_an_async_collective_that_nobody_joins_is_a_deadlock_when_it_is_waited_for() -> None:
    def run(backend: Backend) -> str:
        if backend.rank == 0:
            pending = phalanx.async_all_reduce(torch.ones(2), backend)
            assert not pending.done()
            for _ in range(2):
                with pytest.raises(DeadlockError):
                    pending.wait()
            with pytest.raises(DeadlockError, match="the group is broken"):
                backend.barrier()
        return "done"

    assert simulate(run, 2) == ["done", "done"]


# Errors -------------------------------------------------------------------------------------


def fail_here() -> None:
    raise KeyError("the cause")


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("seed", range(3))
def test_the_root_cause_is_raised_with_its_own_traceback(culprit: int, seed: int) -> None:
    def run(backend: Backend) -> None:
        with backend:  # closes, so that the others lose their peer
            backend.barrier()
            if backend.rank == culprit:
                fail_here()
            backend.barrier()

    with pytest.raises(KeyError, match="the cause") as info:
        simulate(run, 3, seed)
    frames = traceback.extract_tb(info.value.__traceback__)
    assert frames[-1].name == "fail_here"


def test_the_others_are_stopped_by_what_except_exception_does_not_catch() -> None:
    stopped, cleaned = [], []

    def run(backend: Backend) -> None:
        try:
            if backend.rank == 1:
                raise KeyError("the cause")
            while True:
                try:
                    backend.barrier()
                except Exception:  # what training code does to go on
                    continue
        except RankStopped:
            stopped.append(backend.rank)
            raise
        finally:
            cleaned.append(backend.rank)

    with pytest.raises(KeyError):
        simulate(run, 4)
    assert not issubclass(RankStopped, Exception)
    assert sorted(cleaned) in ([1], sorted([1, *stopped]))


def test_ranks_that_wait_when_another_fails_are_all_stopped() -> None:
    stopped = []

    def run(backend: Backend) -> None:
        if backend.rank == 2:
            for src in (0, 1, 3):
                backend.recv(bytearray(1), src)
            raise KeyError("the cause")
        backend.send(b"x", 2)
        try:
            backend.recv(bytearray(1), 2)
        except RankStopped:
            stopped.append(backend.rank)
            raise

    with pytest.raises(KeyError):
        simulate(run, 4)
    assert sorted(stopped) == [0, 1, 3]


def test_no_thread_outlives_a_run() -> None:
    before = set(threading.enumerate())

    def run(backend: Backend) -> None:
        backend.barrier()
        if backend.rank == 1:
            raise SystemExit(3)
        backend.barrier()

    with pytest.raises(SystemExit):
        simulate(run, 4)
    assert set(threading.enumerate()) == before


def test_a_thread_that_is_no_rank_must_not_wait() -> None:
    def run(backend: Backend) -> str:
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                backend.recv(bytearray(1), 1 - backend.rank)
            except MisuseError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        return str(caught[0])

    assert "only the rank's own thread may wait" in simulate(run, 2)[0]


def test_runs_may_be_nested() -> None:
    def run(backend: Backend) -> float:
        before = torch.get_rng_state()
        inside = simulate(lambda inner: phalanx.all_reduce(torch.ones(1), inner).item(), 3)
        assert torch.equal(torch.get_rng_state(), before)
        return phalanx.all_reduce(torch.tensor(inside[0]), backend).item()

    assert simulate(run, 2) == [6.0, 6.0]


def test_asking_over_and_over_whether_it_is_done_is_a_deadlock_too() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            pending = phalanx.async_all_reduce(torch.ones(2), backend)
            while not pending.done():
                pass
        else:
            backend.recv(bytearray(1), 0)

    with pytest.raises(DeadlockError, match="asked 10000 times") as info:
        simulate(run, 2)
    assert "rank 1 waits for 0 in recv #0" in str(info.value)


def test_asking_in_turns_until_it_is_done_is_no_deadlock() -> None:
    def run(backend: Backend) -> float:
        if backend.rank == 0:
            for number in range(50):
                backend.send(bytes([number]), 1)
        else:
            for _ in range(50):
                backend.recv(bytearray(1), 0)
        pending = phalanx.async_all_reduce(torch.ones(2), backend)
        while not pending.done():
            pass
        return float(pending.wait()[0])

    assert simulate(run, 2) == [2.0] * 2


@pytest.mark.parametrize("leave", [Backend.close, Backend.abort])
def test_a_rank_that_leaves_in_the_middle_of_a_round_is_named(
    leave: Callable[[Backend], None],
) -> None:
    """Just before it would be sent something: who has begun a round waits for nobody who left."""
    first, _, last = SimulatedBackend.create_group(3)
    first.engine.moved = lambda sent: leave(last)  # as soon as rank 1 has its message
    with pytest.raises(PeerLostError, match=r"broadcast #0 .*: rank 2 (left|was lost)") as info:
        phalanx.broadcast(torch.ones(3), first, algorithm="star")
    assert info.value.peer == 2
