"""`isend` and `irecv`: messages that are under way while their rank does something else."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from clusters import Cluster, whole

import phalanx
from phalanx import (
    Backend,
    CollectiveTimeoutError,
    InvalidRankError,
    MisuseError,
    PeerLostError,
    SelfSendError,
    SizeMismatchError,
    irecv,
    isend,
)


def test_any_number_may_be_outstanding_and_waited_for_in_any_order(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        rank, size = backend.rank, backend.world_size
        peers = [peer for peer in range(size) if peer != rank]
        cases = list(itertools.product(peers, range(3), range(10)))  # peer, tag, number
        buffers = {case: torch.empty(case[2] + 1) for case in cases}
        receives = {
            case: irecv(buffers[case], backend, case[0], tag=case[1])
            for case in cases
            if case[2] % 2 == 0 or case[1] == 0
        }
        sends = [
            isend(torch.full((n + 1,), 100.0 * rank + 10 * tag + n), backend, peer, tag=tag)
            for peer, tag, n in cases
            if n % 2 == 0 or tag == 0
        ]
        order = list(receives)
        random.Random(rank).shuffle(order)
        for peer, tag, n in order:
            assert receives[peer, tag, n].wait() == peer
            assert buffers[peer, tag, n].tolist() == [100.0 * peer + 10 * tag + n] * (n + 1)
        for send in reversed(sends):
            assert send.wait() is None
        assert all(each.done() for each in sends)
        assert all(each.done() for each in receives.values())

    cluster.run(exchange, 3)


def test_receives_of_one_tag_are_served_as_they_were_posted_whatever_order_they_are_waited_for_in(
    cluster: Cluster,
) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            for number in range(6):
                isend(bytes([number]), backend, 1)
            backend.barrier()
            return
        buffers = [bytearray(1) for _ in range(6)]
        pending = [irecv(buffer, backend, 0) for buffer in buffers]
        backend.barrier()
        for number in (5, 0, 3, 1, 4, 2):
            pending[number].wait()
            assert buffers[number][0] == number

    cluster.run(exchange, 2)


def test_both_may_send_more_than_any_buffer_takes_before_either_receives(cluster: Cluster) -> None:
    size = 20 << 20

    def exchange(backend: Backend) -> None:
        other = 1 - backend.rank
        sent = isend(torch.full((size,), backend.rank, dtype=torch.uint8), backend, other)
        backend.barrier()
        into = torch.empty(size, dtype=torch.uint8)
        assert irecv(into, backend, other).wait() == other
        assert bool((into == other).all())
        sent.wait()

    cluster.run(exchange, 2)


def test_done_becomes_true_without_anybody_waiting(cluster: Cluster) -> None:
    def poll(backend: Backend) -> None:
        if backend.rank == 1:
            backend.recv(bytearray(1), 0, tag=1)
            sent = isend(b"abc", backend, 0)
            while not sent.done():
                pass
            return
        into = bytearray(3)
        pending = irecv(into, backend, 1)
        assert not pending.done()
        assert pending.op_name == "recv"
        backend.send(b"!", 1, tag=1)
        while not pending.done():
            pass
        assert into == b"abc"
        assert pending.wait() == 1

    cluster.run(poll, 2)


def test_waiting_twice_gives_the_sender_twice_and_writes_once(cluster: Cluster) -> None:
    def twice(backend: Backend) -> None:
        if backend.rank:
            backend.send(torch.arange(6.0), 0)
            return
        frame = torch.zeros(3, 2)
        pending = irecv(frame.t(), backend, 1)  # not contiguous
        assert pending.wait() == 1
        assert frame.t().flatten().tolist() == [0, 1, 2, 3, 4, 5]
        frame.zero_()
        assert pending.wait(timeout=1e-9) == 1
        assert not frame.any()

    cluster.run(twice, 2)


def test_messages_and_collectives_are_under_way_side_by_side(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        rank, right, left = backend.rank, (backend.rank + 1) % 3, (backend.rank - 1) % 3
        into = [torch.empty(1000) for _ in range(8)]
        receives = [irecv(each, backend, left, tag=n) for n, each in enumerate(into)]
        sums = []
        for number in range(8):
            sums.append(phalanx.async_all_reduce(torch.full((1000,), float(number)), backend))
            isend(torch.full((1000,), 10.0 * rank + number), backend, right, tag=number)
        for number in reversed(range(8)):
            assert receives[number].wait() == left
            assert bool((into[number] == 10.0 * left + number).all())
            assert bool((sums[number].wait() == 3.0 * number).all())

    cluster.run(exchange, 3)


@pytest.mark.timeouts
def test_after_a_timeout_the_message_is_for_the_next_receive(cluster: Cluster) -> None:
    def late(backend: Backend) -> None:
        if backend.rank:
            backend.recv(bytearray(1), 0, tag=1)
            backend.send(b"late", 0)
            return
        first, second, third = bytearray(b"mine"), bytearray(b"mine"), bytearray(4)
        pending = irecv(first, backend, 1, timeout=0.1)
        replaced = irecv(second, backend, None)
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError, match=r"recv #0 .* 0\.1 s") as info:
                pending.wait()
            assert (info.value.peer, info.value.op, info.value.seconds) == (1, "recv", 0.1)
        with pytest.raises(CollectiveTimeoutError, match=r"0\.05 s"):
            replaced.wait(timeout=0.05)
        last = irecv(third, backend, 1)
        backend.send(b"!", 1, tag=1)
        assert last.wait() == 1
        assert [first, second, third] == [b"mine", b"mine", b"late"]

    cluster.run(late, 2)


def test_a_message_of_another_size_is_an_error_of_its_own_receive_only(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank:
            for content in (b"a", b"abc", b"ab"):
                backend.send(content, 0)
            backend.barrier()
            return
        buffers = [bytearray(2) for _ in range(3)]
        pending = [irecv(buffer, backend, 1) for buffer in buffers]
        backend.barrier()
        for each, size in zip(pending[:2], (1, 3), strict=True):
            for _ in range(2):
                with pytest.raises(SizeMismatchError, match=f"expected 2 .* sent {size} bytes"):
                    each.wait()
        assert pending[2].wait() == 1
        assert buffers == [b"\0\0", b"\0\0", b"ab"]

    cluster.run(exchange, 2)


def test_wrong_arguments_are_found_by_the_call_itself(cluster: Cluster) -> None:
    def misuse(backend: Backend) -> None:
        for call in (isend, irecv):
            for peer, error in ((2, InvalidRankError), (-2, InvalidRankError)):
                with pytest.raises(error):
                    call(bytearray(1), backend, peer)
            with pytest.raises(SelfSendError):
                call(bytearray(1), backend, backend.rank)
            with pytest.raises(ValueError, match="tag"):
                call(bytearray(1), backend, 1 - backend.rank, tag=-1)
            with pytest.raises(ValueError, match="timeout"):
                call(bytearray(1), backend, 1 - backend.rank, timeout=0)
        backend.barrier()

    cluster.run(misuse, 2)


def test_closing_ends_what_is_outstanding(cluster: Cluster) -> None:
    def close(backend: Backend) -> None:
        if backend.rank:
            backend.barrier()
            return
        into = bytearray(b"mine")
        pending = [irecv(into, backend, source, tag=tag) for source in (1, None) for tag in (0, 1)]
        backend.barrier()
        whole(backend).close()
        for each in pending:
            assert each.done()
            with pytest.raises(MisuseError, match="closed"):
                each.wait()
        with pytest.raises(MisuseError, match="closed"):
            irecv(into, backend, 1)
        assert into == b"mine"

    cluster.run(close, 2)


def test_when_the_peer_leaves_what_waits_for_it_is_told(cluster: Cluster) -> None:
    def leave(backend: Backend) -> None:
        if backend.rank:
            backend.recv(bytearray(1), 0, tag=7)
            backend.send(b"last", 0)
            whole(backend).close()
            return
        buffers = [bytearray(4), bytearray(4)]
        pending = [irecv(buffer, backend, 1) for buffer in buffers]
        backend.send(b"!", 1, tag=7)
        assert pending[0].wait() == 1
        assert buffers[0] == b"last"
        with pytest.raises(PeerLostError, match=r"rank 1.* left"):
            pending[1].wait()

    cluster.run(leave, 2)


def test_a_simulated_run_with_messages_from_anyone_is_the_same_every_time() -> None:
    def exchange(backend: Backend) -> list[tuple[int, int]]:
        size = backend.world_size
        others = [rank for rank in range(size) if rank != backend.rank]
        buffers = [bytearray(1) for _ in range(3 * len(others))]
        receives = [irecv(buffer, backend, None) for buffer in buffers]
        for number in range(3):
            for peer in others:
                isend(bytes([number]), backend, peer).done()  # others may go on here
        return [(each.wait(), b[0]) for each, b in zip(receives, buffers, strict=True)]

    runs = {seed: [phalanx.simulate(exchange, 4, seed) for _ in range(2)] for seed in range(5)}
    for first, second in runs.values():
        assert list(first) == list(second)
    orders = {str(list(first)) for first, _ in runs.values()}
    assert len(orders) > 1, "the seed decides"
    for first, _ in runs.values():
        for rank, got in enumerate(first):
            everything = [(peer, n) for peer in range(4) if peer != rank for n in range(3)]
            assert sorted(got) == everything
