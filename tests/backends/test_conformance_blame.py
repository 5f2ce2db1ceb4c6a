"""Who is blamed where ranks do several things at a time, poll, or form a very long chain."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from clusters import CLUSTERS, PATIENCE, Cluster, Simulated, Tcp, Wide
from together import Together

import phalanx
from phalanx import Backend, CollectiveTimeoutError, irecv

SOON = 1.6  # seconds; the questions are asked 0.4 before, for a machine that is busy
ONES = torch.ones(4)

# One of each kind in which chains differ: in memory, over sockets, over sockets that are opened to
# ask, numbered anew in a group.
WAYS = [*(each for each in CLUSTERS if each.name in ("simulated", "tcp", "sub")), Wide()]
ways = pytest.mark.parametrize("ranks", [Together(WAYS)], ids=["together"])


def blamed_by(call: Callable[[], object]) -> int | None:
    """Who is to blame, as the error of a call says."""
    with pytest.raises(CollectiveTimeoutError) as info:
        call()
    return info.value.peer


@ways
def test_a_rank_answers_with_the_call_it_is_in_not_with_what_it_has_outstanding(
    ranks: Cluster,
) -> None:
    gave_up = threading.Event()

    def wait(backend: Backend) -> int | None:
        blamed = None
        if backend.rank == 0:
            blamed = blamed_by(lambda: backend.recv(bytearray(1), 1, timeout=SOON))
            gave_up.set()
            backend.send(b"!", 3)
        elif backend.rank == 1:
            pending = phalanx.async_broadcast(ONES, backend, root=2, algorithm="star")
            backend.recv(bytearray(1), 3)  # it could send to rank 0 after this
            pending.wait()
            return None
        else:
            assert gave_up.wait(PATIENCE)
            if backend.rank == 3:
                backend.send(b"!", 1)
                backend.recv(bytearray(1), 0)
        phalanx.broadcast(ONES, backend, root=2, algorithm="star")
        return blamed

    assert ranks.run(wait, 4)[0] == 3


@ways
def test_questions_of_two_operations_at_a_time_are_not_mixed(ranks: Cluster) -> None:
    """What keeps rank 1 is another rank in each of the two groups."""
    gave_up = threading.Event()
    members = {0: [(0, 1, 2), (0, 1, 3)], 1: [(0, 1, 2), (0, 1, 3)], 2: [(0, 1, 2)], 3: [(0, 1, 3)]}

    def wait(backend: Backend) -> list[int | None]:
        groups = [backend.subgroup(each) for each in members[backend.rank]]
        blamed = []
        if backend.rank == 0:
            pending = [irecv(bytearray(1), group, 1, timeout=SOON) for group in groups]
            blamed = [blamed_by(each.wait) for each in pending]
            gave_up.set()
        elif backend.rank == 1:
            for group in groups:
                irecv(bytearray(1), group, 2)
        assert gave_up.wait(PATIENCE)
        return blamed

    assert ranks.run(wait, 4)[0] == [2, 2]


def test_a_chain_may_be_longer_than_the_stack_is_deep() -> None:
    size = 300
    gave_up = threading.Event()
    all_there = threading.Barrier(size)  # 300 threads may take seconds to start

    def wait(backend: Backend) -> int | None:
        all_there.wait(PATIENCE)
        if backend.rank == 0:
            blamed = blamed_by(lambda: backend.recv(bytearray(1), 1, timeout=3))
            gave_up.set()
            return blamed
        if backend.rank == size - 1:
            assert gave_up.wait(PATIENCE)
        else:
            backend.recv(bytearray(1), backend.rank + 1)
        backend.send(b"!", backend.rank - 1)
        return None

    assert Simulated().run(wait, size)[0] == size - 1


@ways
@pytest.mark.parametrize("what", ["message", "collective"])
def test_a_rank_that_only_asks_whether_it_is_done_learns_of_the_deadline_and_whose_fault_it_is(
    ranks: Cluster, what: str
) -> None:
    gave_up = threading.Event()

    def wait(backend: Backend) -> int | None:
        if backend.rank == 0:
            pending = (
                irecv(bytearray(1), backend, 1, timeout=0.2)
                if what == "message"
                else phalanx.async_broadcast(ONES, backend, root=1, timeout=0.2)
            )
            for _ in range(3000):
                if pending.done() or gave_up.wait(0.01):
                    break
            done, blamed = pending.done(), blamed_by(pending.wait)
            gave_up.set()
            assert done
            return blamed
        assert gave_up.wait(PATIENCE)
        return None

    assert ranks.run(wait, 2)[0] == 1


def test_a_short_deadline_that_nobody_waits_for_names_the_end_of_the_chain() -> None:
    gave_up = threading.Event()

    def wait(backend: Backend) -> int | None:
        into = bytearray(1)
        if backend.rank == 0:
            backend.recv(into, 1)
            pending = irecv(into, backend, 1, timeout=0.4)
            assert not gave_up.wait(1.0)
            blamed = blamed_by(pending.wait)
            gave_up.set()
            return blamed
        if backend.rank == 1:
            backend.send(into, 0)
            backend.recv(into, 2)
            return None
        assert gave_up.wait(PATIENCE)
        backend.send(into, 1)
        return None

    assert Tcp().run(wait, 3)[0] == 2
