"""`wait_any`: whichever is done first, on every kind of backend."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from clusters import Cluster, whole

import phalanx
from phalanx import (
    Backend,
    CollectiveTimeoutError,
    DeadlockError,
    PeerLostError,
    SimulatedBackend,
    irecv,
    isend,
    simulate,
    wait_any,
)

GO = 9  # tag


def test_it_gives_the_place_of_the_one_that_is_done_and_leaves_the_others(
    cluster: Cluster,
) -> None:
    order = [2, 1, 3]

    def exchange(backend: Backend) -> None:
        if backend.rank:
            backend.recv(bytearray(), 0, tag=GO)
            backend.send(bytes([backend.rank]), 0)
            return
        buffers = [bytearray(1) for _ in order]
        pending = [irecv(buffer, backend, peer) for peer, buffer in enumerate(buffers, 1)]
        left = dict(enumerate(pending, 1))
        for peer in order:
            backend.send(b"", peer, tag=GO)
            place = wait_any(list(left.values()))
            assert list(left)[place] == peer
            assert left.pop(peer).wait() == peer
            assert buffers[peer - 1][0] == peer
            assert not any(each.done() for each in left.values())

    cluster.run(exchange, 4)


def test_of_several_that_are_done_it_is_the_first_in_the_list(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank:
            backend.send(b"1", 0, tag=1)
            backend.send(b"2", 0, tag=2)
            backend.recv(bytearray(), 0)
            return
        pending = [irecv(bytearray(1), backend, 1, tag=tag) for tag in range(3)]
        pending[2].wait()
        pending[1].wait()
        assert wait_any(pending) == 1
        assert wait_any(pending[::-1]) == 0
        backend.send(b"", 1)
        pending[0]  # is given up with the backend

    cluster.run(exchange, 2)


def test_it_waits_for_sends_collectives_and_several_groups_alike(cluster: Cluster) -> None:
    size = 20 << 20  # more than is kept on the way

    def exchange(backend: Backend) -> None:
        pair = backend.subgroup([0, backend.rank or 1]) if backend.rank < 2 else None
        other = backend.subgroup([0, 2]) if backend.rank in (0, 2) else None
        if backend.rank == 0:
            assert pair is not None
            assert other is not None
            sent = isend(torch.ones(size, dtype=torch.uint8), pair, 1)
            total = phalanx.async_all_reduce(torch.ones(3), other)
            here = irecv(bytearray(1), pair, 1)
            left = [sent, total, here]
            while left:
                left.pop(wait_any(left)).wait()
            assert total.wait().tolist() == [2.0] * 3
        elif pair is not None:
            pair.send(b"!", 0)
            into = torch.zeros(size, dtype=torch.uint8)
            pair.recv(into, 0)
            assert bool(into.all())
        elif other is not None:
            phalanx.all_reduce(torch.ones(3), other)

    cluster.run(exchange, 3)


def test_a_failure_is_one_way_to_be_done_and_the_other_groups_go_on(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank == 1:
            backend.recv(bytearray(), 0)
            whole(backend).close()
            return
        if backend.rank == 2:
            group = backend.subgroup([0, 2])
            group.recv(bytearray(), 0)
            group.send(b"2", 0)
            return
        first, second = backend.subgroup([0, 1]), backend.subgroup([0, 2])
        pending = [irecv(bytearray(1), first, 1), irecv(bytearray(1), second, 1)]
        backend.send(b"", 1)
        assert wait_any(pending) == 0
        with pytest.raises(PeerLostError, match=r"rank 1.* left"):
            pending[0].wait()
        second.send(b"", 1)
        assert wait_any(pending[1:]) == 0
        assert pending[1].wait() == 1

    cluster.run(exchange, 3)


@pytest.mark.timeouts
def test_a_deadline_names_all_that_are_waited_for_and_gives_nothing_up(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank:
            backend.recv(bytearray(), 0)
            backend.send(b"!", 0)
            return
        pending = [irecv(bytearray(1), backend, peer) for peer in (1, 2)]
        with pytest.raises(CollectiveTimeoutError, match=r"wait_any .*recv.* 0\.2 s for") as info:
            wait_any(pending, timeout=0.2)
        text = re.sub(
            r" \(rank \d of the job\)| in the group of ranks \[[\d, ]*\]", "", str(info.value)
        )
        assert re.search(r"0\.2 s for ranks (1, 2|2, 1), which", text)
        assert info.value.seconds == 0.2
        for peer in (1, 2):
            backend.send(b"", peer)
        for each in pending:
            each.wait()

    cluster.run(exchange, 3)


@pytest.mark.timeouts
def test_the_one_whose_own_time_is_over_is_done(cluster: Cluster) -> None:
    gave_up = threading.Event()

    def exchange(backend: Backend) -> None:
        if backend.rank:
            assert gave_up.wait(20)
            backend.send(b"!", 0)
            return
        patient = irecv(bytearray(1), backend, 1)
        pending = [irecv(bytearray(1), backend, 1, tag=1, timeout=0.2), patient]
        assert wait_any(pending) == 0
        gave_up.set()
        with pytest.raises(CollectiveTimeoutError):
            pending[0].wait()
        patient.wait()

    cluster.run(exchange, 2)


def test_in_a_simulation_waiting_for_any_in_vain_is_a_deadlock_that_says_for_whom() -> None:
    def wait(backend: Backend) -> None:
        if backend.rank == 0:
            wait_any([irecv(bytearray(1), backend, peer) for peer in (1, 2)])
        elif backend.rank == 1:
            backend.recv(bytearray(1), 0)

    words = r"rank 0 waits for 1, 2 \(which has returned\) in wait_any"
    with pytest.raises(DeadlockError, match=words):
        simulate(wait, 3)


def test_what_several_ranks_wait_for_is_refused() -> None:
    first, second = SimulatedBackend.create_group(2)
    with pytest.raises(ValueError, match="what one rank waits for: these are of several ranks"):
        wait_any([irecv(bytearray(1), first, 1), irecv(bytearray(1), second, 0)])
    first.close()
    second.close()


def test_what_makes_no_sense_is_refused(cluster: Cluster) -> None:
    def misuse(backend: Backend) -> None:
        with pytest.raises(ValueError, match="nothing"):
            wait_any([])
        pending = isend(b"", backend, 1 - backend.rank)
        if backend.world_size == 2:
            backend.recv(bytearray(), 1 - backend.rank)
        with pytest.raises(ValueError, match="positive"):
            wait_any([pending], timeout=0)
        assert wait_any([pending]) == 0

    cluster.run(misuse, 2)
