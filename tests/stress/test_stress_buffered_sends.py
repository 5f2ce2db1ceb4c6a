"""Sends before receives: who takes the messages in, how many, and what is said beyond that.

backend     a send is done when                      who drains
simulated   it returns; the message is copied        nobody has to; there is no limit
TCP         the kernel has taken the last byte       the receiver, while it waits in any call or
                                                     has something asynchronous under way; it
                                                     keeps 256 MiB of each peer's messages
"""

from __future__ import annotations

import re
import threading
from itertools import permutations

import pytest
import torch
from clusters import PATIENCE, Cluster, Tcp

from phalanx import Backend, CollectiveTimeoutError, irecv

MIB = 1 << 20
LIMIT = 256 * MIB  # bytes of one peer's that a rank keeps for later
tcp = Tcp()


def filled(size: int, *what: int) -> torch.Tensor:
    """A message whose content tells which one it is."""
    return torch.full((size,), hash(what) % 251, dtype=torch.uint8)


def expect(backend: Backend, size: int, src: int, tag: int, *what: int) -> None:
    into = torch.empty(size, dtype=torch.uint8)
    backend.recv(into, src, tag=tag)
    assert torch.equal(into, filled(size, *what))


def test_all_ranks_send_everything_to_everyone_before_anyone_receives(cluster: Cluster) -> None:
    sizes = (0, 1, 1000, 2 * MIB)

    def exchange(backend: Backend) -> None:
        rank, world = backend.rank, range(backend.world_size)
        for dst in world:
            for tag, size in enumerate(sizes):
                if dst != rank:
                    backend.send(filled(size, rank, dst, tag), dst, tag=tag)
        for src in world:
            for tag, size in enumerate(sizes):
                if src != rank:
                    expect(backend, size, src, tag, src, rank, tag)

    cluster.run(exchange, 4)


def test_a_circle_of_sends_larger_than_any_socket_finishes(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        rank, size = backend.rank, backend.world_size
        backend.send(filled(24 * MIB, rank), (rank + 1) % size)
        expect(backend, 24 * MIB, (rank - 1) % size, 0, (rank - 1) % size)

    cluster.run(exchange, 3)


def test_messages_are_received_in_whatever_order_of_their_tags(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        for order in permutations(range(4)):
            if backend.rank == 0:
                for tag in range(4):
                    for number in range(2):
                        backend.send(filled(100 * tag + 1, tag, number), 1, tag=tag)
            else:
                for tag in order:
                    for number in range(2):
                        expect(backend, 100 * tag + 1, 0, tag, tag, number)

    cluster.run(exchange, 2)


def test_sends_are_received_after_collectives_that_came_later(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        rank, size = backend.rank, backend.world_size
        pair = backend.subgroup(sorted({rank, rank ^ 1})) if rank ^ 1 < size else None
        backend.send(filled(3 * MIB, rank), (rank + 1) % size)
        backend.barrier()
        if pair is not None:
            pair.send(filled(MIB, rank, 7), 1 - pair.rank)
            pair.barrier()
            expect(pair, MIB, 1 - pair.rank, 0, rank ^ 1, 7)
        expect(backend, 3 * MIB, (rank - 1) % size, 0, (rank - 1) % size)

    cluster.run(exchange, 3)


def test_64_mib_to_each_of_two_peers_before_any_receive() -> None:
    def exchange(backend: Backend) -> None:
        others = [rank for rank in range(3) if rank != backend.rank]
        for dst in others:
            backend.send(filled(64 * MIB, backend.rank), dst)
        for src in reversed(others):
            expect(backend, 64 * MIB, src, 0, src)

    tcp.run(exchange, 3)


def test_the_receiver_drains_while_it_waits_for_something_else(cluster: Cluster) -> None:
    """Rank 1 waits for rank 2, which sends only when rank 0's large send to rank 1 is done."""

    def exchange(backend: Backend) -> None:
        rank, into = backend.rank, bytearray(1)
        if rank == 0:
            backend.send(filled(48 * MIB, 5), 1)
            backend.send(b"x", 2)
        elif rank == 1:
            backend.recv(into, 2)
            expect(backend, 48 * MIB, 0, 0, 5)
        else:
            backend.recv(into, 0)
            backend.send(b"y", 1)

    cluster.run(exchange, 3)


@pytest.mark.timeouts
def test_the_receiver_drains_in_the_background_while_something_asynchronous_is_under_way(
    cluster: Cluster,
) -> None:
    sent = threading.Event()

    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(filled(48 * MIB, 6), 1, tag=6)
            sent.set()
            backend.send(b"x", 1)
        else:
            pending = irecv(bytearray(1), backend, 0)
            assert sent.wait(PATIENCE), "nobody took the message in"
            assert pending.wait() == 0
            expect(backend, 48 * MIB, 0, 6, 6)

    cluster.run(exchange, 2)


def test_a_receiver_in_no_call_drains_nothing_and_the_sender_says_so() -> None:
    gave_up = threading.Event()

    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError) as info:
                backend.send(filled(64 * MIB, 1), 1, timeout=0.5)
            gave_up.set()
            assert info.value.peer == 1
            assert "does not answer: it has made no matching call, and is in no other" in str(
                info.value
            )
        else:
            assert gave_up.wait(PATIENCE)

    tcp.run(exchange, 2)


def test_256_mib_are_kept_and_who_sends_more_is_told_what_waits_for_what() -> None:
    """Nothing is broken then: what was kept is received, and so is what is sent afterwards."""
    gave_up = threading.Event()
    part = LIMIT // 4 - MIB  # what a message takes beside its content counts, too

    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            for number in range(4):
                backend.send(filled(part, number), 1, tag=number)
            backend.send(b"go", 2)
            with pytest.raises(CollectiveTimeoutError) as info:
                backend.send(filled(part, 4), 1, tag=4, timeout=1.0)
            gave_up.set()
            assert info.value.peer == 2, "the end of the chain: it has made no call"
            text = re.sub(r" at test_\w+\.py:\d+", "", str(info.value))
            assert text.startswith(
                "rank 0: send #4 (tag 4) waited 1 s for rank 1, which keeps 252 MiB of this "
                "rank's messages that nobody there has received, and takes no more; it waits in "
                "recv #0 for rank 2"
            )
            backend.send(filled(part, 5), 1, tag=5)
        elif backend.rank == 1:
            backend.recv(bytearray(1), 2)
            for number in (3, 1, 0, 2, 5):
                expect(backend, part, 0, number, number)
        else:
            backend.recv(bytearray(2), 0)
            assert gave_up.wait(PATIENCE)
            backend.send(b"x", 1)

    tcp.run(exchange, 3)


def test_who_keeps_256_mib_of_a_peer_that_it_waits_for_is_told_to_receive_those_first() -> None:
    gave_up = threading.Event()
    part = LIMIT // 4 - MIB  # what a message takes beside its content counts, too

    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            for number in range(4):
                backend.send(filled(part, number), 1, tag=number)
            backend.send(b"x", 1, tag=8)
            assert gave_up.wait(PATIENCE)
            backend.send(b"x", 1, tag=9)
            return
        backend.recv(bytearray(1), 0, tag=8)
        with pytest.raises(CollectiveTimeoutError) as info:
            backend.recv(bytearray(1), 0, tag=9, timeout=1.0)
        gave_up.set()
        assert info.value.peer == 0
        text = re.sub(r" at test_\w+\.py:\d+", "", str(info.value))
        assert text == (
            "rank 1: recv #1 (tag 9) waited 1 s for rank 0, of whose messages this rank keeps 252 "
            "MiB that nobody has received, and takes no more: receive those first"
        )
        for number in range(4):
            expect(backend, part, 0, number, number)
        backend.recv(bytearray(1), 0, tag=9)

    tcp.run(exchange, 2)


def test_receives_keep_their_order_when_the_message_of_the_first_is_given_up_in_the_middle() -> (
    None
):
    gave_up = threading.Event()
    size = 24 * MIB  # more than a socket takes

    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError):
                backend.send(filled(size, 0), 1, timeout=0.2)
            gave_up.set()
            for number in (1, 2):
                backend.send(filled(size, number), 1)
            return
        assert gave_up.wait(PATIENCE)
        first, second = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
        pending = [irecv(first, backend, 0), irecv(second, backend, 0)]
        for each in pending:
            assert each.wait() == 0
        assert torch.equal(first, filled(size, 1))
        assert torch.equal(second, filled(size, 2))

    tcp.run(exchange, 2)


def test_a_send_that_timed_out_has_not_sent_its_message() -> None:
    """Or whoever sends it again sends it twice. Nobody reads until a send has timed out."""
    gave_up = threading.Event()
    sent: list[int] = []

    def send_until_one_times_out(backend: Backend) -> None:
        for number in range(1000):
            backend.send(filled(3 * MIB, number), 1, timeout=0.2)
            sent.append(number)

    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError):
                send_until_one_times_out(backend)
            gave_up.set()
            backend.send(b"x", 1, tag=1)
        else:
            assert gave_up.wait(PATIENCE)
            backend.recv(bytearray(1), 0, tag=1)
            for number in sent:
                expect(backend, 3 * MIB, 0, 0, number)
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(torch.empty(3 * MIB, dtype=torch.uint8), 0, timeout=0.2)

    tcp.run(exchange, 2)
