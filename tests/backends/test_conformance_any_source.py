"""`recv(into, None)`: any rank's message, on every kind of backend."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from clusters import Cluster
from raw_peer import message, rank_0_and_a_raw_peer

import phalanx
from phalanx import Backend, CollectiveTimeoutError, SizeMismatchError
from phalanx.collectives.messages import irecv, recv

DATA, GO, HERE = 0, 1, 2  # tags


def let_send(backend: Backend, sender: int) -> None:
    """On rank 0: have a rank send its next message, and see it arrive before this returns."""
    backend.send(b"", sender, tag=GO)
    backend.recv(bytearray(), sender, tag=HERE)


def send_when_told(backend: Backend, contents: list[bytes]) -> None:
    """On the others: `let_send` sends these, one after the other."""
    for content in contents:
        backend.recv(bytearray(), 0, tag=GO)
        backend.send(content, 0, tag=DATA)
        backend.send(b"", 0, tag=HERE)


def test_messages_come_in_the_order_of_their_arrival_each_with_its_sender(
    cluster: Cluster,
) -> None:
    order = [2, 1, 3, 3, 1, 2, 1]

    def exchange(backend: Backend) -> None:
        count = order.count(backend.rank)
        if backend.rank:
            return send_when_told(backend, [bytes([backend.rank, n]) for n in range(count)])
        for sender in order:
            let_send(backend, sender)
        seen: Counter[int] = Counter()
        for sender in order:
            into = bytearray(2)
            assert backend.recv(into, None) == sender
            assert into == bytes([sender, seen[sender]])
            seen[sender] += 1
        return None

    cluster.run(exchange, 4)


def test_receives_from_anyone_and_from_one_rank_take_turns_as_they_were_posted(
    cluster: Cluster,
) -> None:
    """Posted: any, 1, any, 2, any, 2, 1. Each message goes to the first of them that takes it."""
    posted = [None, 1, None, 2, None, 2, 1]
    arrivals = [2, 1, 1, 1, 2, 1, 2]  # whose message comes next,
    taken_by = [0, 1, 2, 4, 3, 6, 5]  # and which receive it is for

    def exchange(backend: Backend) -> None:
        if backend.rank:
            mine = [place for place, sender in enumerate(arrivals) if sender == backend.rank]
            return send_when_told(backend, [bytes([place]) for place in mine])
        buffers = [bytearray(1) for _ in posted]
        pending = [irecv(b, backend, src) for b, src in zip(buffers, posted, strict=True)]
        for sender in arrivals:
            let_send(backend, sender)
        for place, (sender, receive) in enumerate(zip(arrivals, taken_by, strict=True)):
            assert pending[receive].wait() == sender
            assert buffers[receive][0] == place
        return None

    cluster.run(exchange, 3)


def test_early_messages_are_taken_in_the_order_of_their_arrival_by_whoever_asks(
    cluster: Cluster,
) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank:
            return send_when_told(backend, [bytes([backend.rank, n]) for n in range(2)])
        for sender in (1, 2, 2, 1):
            let_send(backend, sender)
        got = []
        for source in (2, None, None, None):
            into = bytearray(2)
            got.append((backend.recv(into, source), into[1]))
        assert got == [(2, 0), (1, 0), (2, 1), (1, 1)]
        return None

    cluster.run(exchange, 3)


def test_tags_groups_and_collectives_are_kept_apart(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        group = backend.subgroup([0, 1, 2])
        if backend.rank:
            backend.send(bytes([5]), 0, tag=5)
            group.send(bytes([50]), 0, tag=6)
            backend.send(bytes([6]), 0, tag=6)
        into = bytearray(1)
        if backend.rank == 0:
            pending = irecv(into, backend, None, tag=6)
        assert phalanx.all_reduce(torch.ones(3), backend).tolist() == [3.0] * 3
        if backend.rank == 0:
            first = pending.wait()
            assert (first in (1, 2), into[0]) == (True, 6)
            assert backend.recv(into, None, tag=6) == 3 - first
            assert into[0] == 6
            assert sorted(backend.recv(into, None, tag=5) for _ in range(2)) == [1, 2]
            assert into[0] == 5
            assert sorted(group.recv(into, None, tag=6) for _ in range(2)) == [1, 2]
            assert into[0] == 50

    cluster.run(exchange, 3)


@pytest.mark.checkered
@pytest.mark.parametrize("size", [0, 1, 5 << 20])
def test_messages_of_every_size_are_whole_however_many_come_at_once(
    cluster: Cluster, size: int
) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank:
            backend.send(bytes([backend.rank]) * size, 0)
            return
        senders = []
        for _ in range(3):
            into = torch.zeros(size, dtype=torch.uint8)
            senders.append(recv(into, backend, None))
            assert (into == senders[-1]).all()
        assert sorted(senders) == [1, 2, 3]

    cluster.run(exchange, 4)


@pytest.mark.timeouts
def test_a_large_message_is_not_lost_when_its_receive_times_out_in_the_middle(
    cluster: Cluster,
) -> None:
    size = 5 << 20

    def exchange(backend: Backend) -> None:
        if backend.rank:
            for content in range(2):
                backend.send(bytes([10 * backend.rank + content]) * size, 0)
            return
        contents: dict[int, list[int]] = {1: [], 2: []}
        while sum(map(len, contents.values())) < 4:
            into = bytearray(size)
            try:
                sender = backend.recv(into, None, timeout=1e-3)
            except CollectiveTimeoutError:
                continue
            assert into == into[:1] * size
            contents[sender].append(into[0])
        assert contents == {1: [10, 11], 2: [20, 21]}

    cluster.run(exchange, 3)


def test_half_a_message_that_timed_out_waits_for_its_other_half() -> None:
    payload = bytes(range(256)) * 4096
    data = message(payload)
    with rank_0_and_a_raw_peer() as (backend, peer):
        peer.sock.sendall(data[: len(data) // 2])
        given_up = bytearray(len(payload))
        for source in (None, 1, None):
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(given_up, source, timeout=0.1)
        written = bytes(given_up)
        peer.sock.sendall(data[len(data) // 2 :])
        into = bytearray(len(payload))
        assert backend.recv(into, None) == 1
        assert into == payload
        assert given_up == written


def test_one_of_another_size_is_dropped_and_its_sender_named(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank:
            return send_when_told(backend, [b"abc"] if backend.rank == 2 else [b"ab"])
        pending = irecv(bytearray(2), backend, None)
        for sender in (2, 1):
            let_send(backend, sender)
        with pytest.raises(SizeMismatchError, match="expected 2 bytes from rank 2") as info:
            pending.wait()
        assert info.value.peer == 2
        assert backend.recv(bytearray(2), None) == 1
        return None

    cluster.run(exchange, 3)


@pytest.mark.timeouts  # under simulate() only a rank's own thread may wait
def test_threads_that_receive_from_anyone_get_every_message_once(cluster: Cluster) -> None:
    count, threads = 60, 4

    def exchange(backend: Backend) -> None:
        if backend.rank:
            for number in range(count):
                backend.send(bytes([backend.rank, number]), 0)
            return
        got: list[tuple[int, bytes]] = []

        def receive() -> None:
            for _ in range(2 * count // threads):
                into = bytearray(2)
                sender = backend.recv(into, None)
                got.append((sender, bytes(into)))

        receivers = [threading.Thread(target=receive) for _ in range(threads)]
        for thread in receivers:
            thread.start()
        for thread in receivers:
            thread.join()
        sent = [(rank, bytes([rank, n])) for rank in (1, 2) for n in range(count)]
        assert sorted(got) == sorted(sent)

    cluster.run(exchange, 3)
