"""In shared memory, who only gives in a collective with a root does not wait for the others."""

from __future__ import annotations

import threading

import pytest
import torch
from clusters import SharedMemory

import phalanx
from phalanx import Backend, CollectiveTimeoutError, DesyncError, PeerLostError
from phalanx.transport.shm.peer_slot import AHEAD

SHM = SharedMemory()


def test_what_a_root_gave_ahead_is_what_the_others_get() -> None:
    over = threading.Event()
    count = AHEAD - 1

    def run(backend: Backend) -> list[float]:
        if backend.rank == 0:
            for number in range(count):
                phalanx.broadcast_(torch.full((10,), float(number)), backend, 0)
            over.set()
            return []
        assert over.wait(30), "the root waits for the others"
        return [float(phalanx.broadcast(torch.empty(10), backend, 0)[9]) for _ in range(count)]

    assert SHM.run(run, 3) == [[], *[[float(number) for number in range(count)]] * 2]


def test_a_root_that_is_as_far_ahead_as_it_may_names_the_one_it_waits_for() -> None:
    over = threading.Event()

    def run(backend: Backend) -> None:
        if backend.rank == 2:
            assert over.wait(30)
            return
        for _ in range(AHEAD - 1):
            phalanx.broadcast_(torch.ones(10), backend, 0)
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="rank 2") as info:
                phalanx.broadcast_(torch.ones(10), backend, 0, timeout=0.2)
            assert (info.value.rank, info.value.peer) == (0, 2)
            over.set()
        else:
            with pytest.raises((PeerLostError, CollectiveTimeoutError), match="rank 2"):
                phalanx.broadcast_(torch.ones(10), backend, 0)

    SHM.run(run, 3)


def test_a_root_may_leave_before_the_others_come() -> None:
    left = threading.Event()

    def run(backend: Backend) -> float:
        if backend.rank == 0:
            group = backend.subgroup(range(2))
            phalanx.broadcast_(torch.full((5,), 7.0), group, 0)
            group.close()
            for _ in range(3):  # others' memory may take the place of what is given back
                phalanx.broadcast_(torch.zeros(5), backend.subgroup(range(1)), 0)
            left.set()
            return 7.0
        assert left.wait(30)
        group = backend.subgroup(range(2))
        return float(phalanx.broadcast(torch.empty(5), group, 0)[0])

    assert SHM.run(run, 2) == [7.0, 7.0]


def test_a_rank_that_does_something_else_is_told_and_so_is_the_root_at_its_next_call() -> None:
    over = threading.Event()

    def run(backend: Backend) -> None:
        if backend.rank == 0:
            phalanx.broadcast_(torch.ones(10), backend, 0)
            over.set()
            with pytest.raises(DesyncError, match=r"called broadcast.*\n.*called all_reduce"):
                backend.barrier()
            return
        assert over.wait(30)
        with pytest.raises(DesyncError, match=r"called broadcast.*\n.*called all_reduce"):
            phalanx.all_reduce(torch.ones(10), backend)

    SHM.run(run, 2)


def test_givers_of_a_small_gather_and_reduce_do_not_wait_for_the_root() -> None:
    over = threading.Barrier(3, timeout=30)

    def run(backend: Backend) -> list[float]:
        mine, found = torch.full((3,), float(backend.rank)), []
        if backend.rank == 1:
            over.wait()
        for _ in range(AHEAD // 2 - 1):
            total = phalanx.reduce(mine, backend, 1)
            whole = phalanx.gather(mine, backend, 1)
            if backend.rank == 1:
                assert total is not None
                assert whole is not None
                found += [float(total[0]), float(whole.flatten()[-1])]
        if backend.rank != 1:
            over.wait()
        return found

    _, found, _ = SHM.run(run, 3)
    assert found == [3.0, 2.0] * (AHEAD // 2 - 1)
