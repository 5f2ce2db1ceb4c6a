"""send_object, recv_object: what comes, of which the receiver knows nothing before."""

from __future__ import annotations

import threading

import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import (
    Backend,
    CollectiveTimeoutError,
    InvalidRankError,
    MalformedObjectError,
    PeerLostError,
    SelfSendError,
    SimulatedBackend,
    UnsupportedObjectError,
    UnsupportedOperationError,
    simulate,
)
from phalanx.collectives.objects import HEAD, HEADS

PROMPT = 15.0  # seconds after which a rank that was not told gives up, with an error that shows it
THINGS = [None, 2**100, b"", b"x" * 12_345, {"a": [1, (2.5, "\u00e9")], 3: True}, "y" * (5 << 20)]


def test_any_object_arrives_in_order_whatever_its_length(cluster: Cluster) -> None:
    def run(backend: Backend) -> list[object]:
        if backend.rank == 0:
            for thing in THINGS:
                phalanx.send_object(thing, backend, 1)
            return THINGS
        return [phalanx.recv_object(0, backend) for _ in THINGS]

    assert cluster.run(run, 2) == [THINGS] * 2


def test_tensors_arrive_with_their_shapes_and_dtypes(cluster: Cluster) -> None:
    given = [torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(), torch.zeros(0, 4)]

    def run(backend: Backend) -> None:
        if backend.rank == 1:
            phalanx.send_object(given, backend, 0)
            return
        found = phalanx.recv_object(1, backend)
        assert isinstance(found, list)
        for one, other in zip(given, found, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert torch.equal(one, other)

    cluster.run(run, 2)


def test_tags_groups_and_messages_of_bytes_do_not_mix_with_objects(cluster: Cluster) -> None:
    def run(backend: Backend) -> object:
        if backend.rank == 0:
            phalanx.send_object("first", backend, 1, tag=7)
            phalanx.send_object("second", backend, 1)
            backend.send(b"bytes", 1, tag=7)
            phalanx.send_object("third", backend, 1, tag=7)
            phalanx.send_object("group", backend.subgroup([0, 2]), 1)
            return None
        if backend.rank == 2:
            return phalanx.recv_object(0, backend.subgroup([0, 2]))
        into = bytearray(5)
        backend.recv(into, 0, tag=7)
        found = [phalanx.recv_object(0, backend, tag=tag) for tag in (0, 7, 7)]
        return [bytes(into), *found]

    expected = [None, [b"bytes", "second", "first", "third"], "group"]
    assert cluster.run(run, 3) == expected


def test_an_object_may_come_from_any_rank(cluster: Cluster) -> None:
    def run(backend: Backend) -> list[object]:
        if backend.rank:
            phalanx.send_object([backend.rank] * 3**backend.rank, backend, 0)
            return []
        return [phalanx.recv_object(None, backend) for _ in range(2)]

    assert sorted(cluster.run(run, 3)[0]) == [[1] * 3, [2] * 9]


def test_receivers_in_several_threads_each_get_a_whole_object() -> None:
    sender, receiver = SimulatedBackend.create_group(2)
    found: list[object] = []

    def receive() -> None:
        found.append(phalanx.recv_object(0, receiver))

    threads = [threading.Thread(target=receive) for _ in range(8)]
    for thread in threads:
        thread.start()
    for length in range(8):
        phalanx.send_object(b"x" * 10**length if length < 6 else length, sender, 1)
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == sorted([*(b"x" * 10**n for n in range(6)), 6, 7], key=str)


def test_an_object_that_cannot_be_sent_is_told_to_who_waits_for_it(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 1:
            with pytest.raises(UnsupportedObjectError, match=r"obj\[1\] is a set") as info:
                phalanx.send_object([1, {2}], backend, 0)
            assert (info.value.rank, info.value.op) == (1, "send_object")
            return
        with pytest.raises(UnsupportedOperationError, match=r"rank 1: send_object: obj\[1\]"):
            phalanx.recv_object(1, backend)

    cluster.run(run, 2, timeout=PROMPT)


@pytest.mark.timeouts
def test_an_object_that_does_not_come_in_time_is_not_lost(cluster: Cluster) -> None:
    gave_up = threading.Event()

    def run(backend: Backend) -> object:
        if backend.rank == 1:
            assert gave_up.wait(30)
            return phalanx.send_object("late", backend, 0)
        with pytest.raises(CollectiveTimeoutError, match="an object") as info:
            phalanx.recv_object(1, backend, timeout=0.05)
        assert info.value.peer == 1
        gave_up.set()
        return phalanx.recv_object(1, backend)

    assert cluster.run(run, 2) == ["late", None]


def begin_an_object(backend: Backend, length: int) -> None:
    """What a rank has sent that gives up in the middle of an object; or lies."""
    backend.isend(HEAD.pack(2 * HEADS, length), 0, stream=HEADS).wait()


@pytest.mark.timeouts
def test_whoever_gives_up_in_the_middle_of_an_object_tells_the_others(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 1:
            begin_an_object(backend, 100)
            with pytest.raises(PeerLostError, match="rank 0 gave up in the middle of an object"):
                phalanx.recv_object(0, backend, timeout=PROMPT)
            return
        with pytest.raises(CollectiveTimeoutError):
            phalanx.recv_object(1, backend)

    cluster.run(run, 2, timeout=1.0)


@pytest.mark.checkered
@pytest.mark.parametrize("length", [0, 1 << 50])
def test_a_length_that_no_object_has_is_refused_before_memory_is_taken(
    cluster: Cluster, length: int
) -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 1:
            begin_an_object(backend, length)
            return
        with pytest.raises(MalformedObjectError, match=f"#0: rank 1 announced .* {length:,}"):
            phalanx.recv_object(1, backend)

    cluster.run(run, 2, timeout=PROMPT)


def test_bytes_that_are_no_object_are_an_error_where_they_arrive() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 1:
            begin_an_object(backend, 2)
            backend.isend(b"?!", 0, stream=2 * HEADS).wait()
            return
        with pytest.raises(MalformedObjectError, match=r"of rank 1 .*same version"):
            phalanx.recv_object(1, backend)

    simulate(run, 2)


def test_a_peer_that_cannot_be_is_refused(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        for peer, error in ((2, InvalidRankError), (backend.rank, SelfSendError)):
            with pytest.raises(error):
                phalanx.send_object(1, backend, peer)
            with pytest.raises(error):
                phalanx.recv_object(peer, backend)
        backend.barrier()

    cluster.run(run, 2)
    (alone,) = SimulatedBackend.create_group(1)
    with pytest.raises(SelfSendError):
        phalanx.recv_object(None, alone)
