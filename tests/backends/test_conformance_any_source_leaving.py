"""`recv(into, None)` when those who could send leave, are lost, or never were."""

from __future__ import annotations

import threading

import pytest
from clusters import PATIENCE, Cluster, Tcp, whole

from phalanx import (
    Backend,
    CollectiveTimeoutError,
    PeerLostError,
    SelfSendError,
    SizeMismatchError,
    irecv,
)

pytestmark = pytest.mark.wide

GO = 1  # tag


def test_what_came_before_its_sender_left_is_received_and_then_the_others_count(
    cluster: Cluster,
) -> None:
    def leave(backend: Backend) -> None:
        into = bytearray(1)
        if backend.rank == 1:
            backend.send(b"1", 0)
            whole(backend).close()
        elif backend.rank == 2:
            backend.recv(into, 0, tag=GO)
            backend.send(b"2", 0)
            backend.recv(into, 0, tag=GO)
            whole(backend).close()
        else:
            assert backend.recv(into, None) == 1
            backend.send(b"!", 2, tag=GO)
            assert backend.recv(into, None) == 2  # not stopped by the one that has left
            pending = irecv(into, backend, None)
            backend.send(b"!", 2, tag=GO)
            with pytest.raises(PeerLostError, match="left"):
                pending.wait()
            with pytest.raises(PeerLostError, match="every other rank left"):
                backend.recv(into, None)

    cluster.run(leave, 3)


def test_a_rank_that_is_lost_ends_a_wait_for_anyone_and_is_named(cluster: Cluster) -> None:
    def lose(backend: Backend) -> None:
        if backend.rank == 1:
            backend.recv(bytearray(), 0, tag=GO)
            whole(backend).abort()
            return
        if backend.rank == 0:
            pending = irecv(bytearray(1), backend, None)
            backend.send(b"", 1, tag=GO)
            with pytest.raises(PeerLostError) as info:
                pending.wait()
        else:
            with pytest.raises(PeerLostError) as info:
                backend.recv(bytearray(1), None)
        assert info.value.peer == 1

    cluster.run(lose, 3)


def test_alone_there_is_nobody_to_receive_from(cluster: Cluster) -> None:
    def alone(backend: Backend) -> None:
        group = backend.subgroup([backend.rank])
        for call in (group.recv, lambda into, src: irecv(into, group, src)):
            with pytest.raises(SelfSendError, match="no other rank"):
                call(bytearray(1), None)

    cluster.run(alone, 2)


def test_when_a_sender_gives_up_the_next_message_counts_and_an_error_is_its_receives_only() -> None:
    """Rank 1 gives up in the middle of a large message; that of rank 2 is too small."""
    size = 60 << 20
    begun, small, given_up = threading.Event(), threading.Event(), threading.Event()

    def exchange(backend: Backend) -> None:
        if backend.rank == 1:
            begins = backend.isend(bytes(size), 0, background=False)
            begun.set()
            assert small.wait(PATIENCE)
            with pytest.raises(CollectiveTimeoutError):
                begins.wait(timeout=1e-6)
            given_up.set()
        elif backend.rank == 2:
            backend.recv(bytearray(), 0, tag=GO)
            backend.send(b"abc", 0)
            backend.send(b"", 0, tag=GO)
        else:
            assert begun.wait(PATIENCE)
            pending = irecv(bytearray(size), backend, None)
            while not backend.engine.matching.in_progress:
                assert not pending.done()
            backend.send(b"", 2, tag=GO)
            backend.recv(bytearray(), 2, tag=GO)
            with backend.engine.lock:  # nothing is read meanwhile, or all of it might get through
                small.set()
                assert given_up.wait(PATIENCE)
            with pytest.raises(SizeMismatchError, match="from rank 2"):
                pending.wait()
        backend.barrier()

    Tcp().run(exchange, 3)
