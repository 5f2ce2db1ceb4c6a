"""TCP: large messages, slow readers, and peers that are not in a call."""

from __future__ import annotations

import threading

import pytest
import torch
from clusters import Tcp

import phalanx
from phalanx import Backend, CollectiveTimeoutError, PeerLostError

LARGE = 64 << 20
tcp = Tcp()


def test_two_ranks_send_256_mib_to_each_other_at_the_same_moment() -> None:
    def exchange(backend: Backend) -> None:
        other = 1 - backend.rank
        mine = torch.full((4 * LARGE,), backend.rank + 1, dtype=torch.uint8)
        into = torch.zeros(4 * LARGE, dtype=torch.uint8)
        backend.sendrecv(mine, other, into, other)
        assert (into == other + 1).all()

    tcp.run(exchange, 2)


def test_two_ranks_that_both_send_64_mib_before_they_receive_finish() -> None:
    def exchange(backend: Backend) -> None:
        other = 1 - backend.rank
        into = torch.zeros(LARGE, dtype=torch.uint8)
        backend.send(torch.full((LARGE,), backend.rank + 1, dtype=torch.uint8), other)
        backend.recv(into, other)
        assert (into == other + 1).all()

    tcp.run(exchange, 2)


def test_a_large_message_that_its_sender_gave_up_leaves_no_half_behind() -> None:
    """Nobody reads; the send times out with a part of it on the way. The next message is whole."""
    gave_up = threading.Event()

    def run(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"send #0.*rank 1") as info:
                backend.send(torch.zeros(LARGE, dtype=torch.uint8), 1, timeout=0.2)
            assert (info.value.peer, info.value.op) == (1, "send")
            gave_up.set()
            backend.send(torch.ones(LARGE, dtype=torch.uint8), 1)
        else:
            assert gave_up.wait(30)
            into = torch.zeros(LARGE, dtype=torch.uint8)
            backend.recv(into, 0)
            assert into.all()

    tcp.run(run, 2)


def test_a_collective_that_timed_out_half_way_leaves_other_groups_whole() -> None:
    gave_up = threading.Event()

    def run(backend: Backend) -> None:
        inner = backend.subgroup([0, 1])
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError):
                phalanx.broadcast(torch.zeros(LARGE, dtype=torch.uint8), inner, timeout=0.2)
            gave_up.set()
        else:
            assert gave_up.wait(30)
        assert phalanx.all_reduce(torch.ones(1 << 20), backend).sum() == 2 << 20

    tcp.run(run, 2)


def test_a_message_larger_than_what_is_kept_early_waits_for_its_receive() -> None:
    """More than 256 MiB that nobody asked for is not taken into memory, and not lost either."""
    size = (256 << 20) + 1

    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(torch.zeros(size, dtype=torch.uint8), 1)
        else:
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1), 0, tag=1, timeout=0.2)
            into = torch.ones(size, dtype=torch.uint8)
            backend.recv(into, 0)
            assert not into.any()

    tcp.run(exchange, 2)


def test_a_peer_that_is_lost_between_two_messages_is_named_by_the_next_call() -> None:
    def run(backend: Backend) -> None:
        into = bytearray(1)
        if backend.rank == 1:
            backend.send(b"x", 0)
            backend.recv(into, 0)
            backend.abort()
            return
        backend.recv(into, 1)
        backend.send(b"y", 1)
        with pytest.raises(PeerLostError, match="rank 1 was lost") as info:
            backend.recv(into, 1)
        assert info.value.peer == 1
        for _ in range(3):
            with pytest.raises(PeerLostError, match="the group is broken"):
                backend.send(b"z", 1)

    tcp.run(run, 2)


def test_two_that_call_each_other_at_the_same_time_have_one_connection() -> None:
    """Ranks 1 and 2 have no connection until both send at once; many times, for luck."""

    def cross(backend: Backend) -> None:
        size, into = backend.world_size, bytearray(1)
        backend.barrier()
        for distance in range(1, size):
            right, left = (backend.rank + distance) % size, (backend.rank - distance) % size
            backend.sendrecv(bytes([backend.rank]), right, into, left)
            assert into[0] == left

    for _ in range(5):
        tcp.run(cross, 5)


def test_ranks_of_this_host_know_that_they_share_it() -> None:
    assert tcp.run(lambda backend: backend.topology, 3) == [(0, 0, 0)] * 3


@pytest.mark.parametrize("processors", [1, 2, 3])
def test_collectives_are_moved_beside_the_computation_only_with_a_processor_to_spare(
    processors: int,
) -> None:
    """Inside a host, where they take turns with it otherwise."""

    def run(backend: Backend) -> None:
        backend.links = backend.links._replace(processors=processors)
        assert backend.spares_a_processor == (processors > 2)
        backend.topology = (0, 1)
        assert backend.spares_a_processor

    tcp.run(run, 2)
