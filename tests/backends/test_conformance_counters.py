"""Counters, on every kind of backend: what was moved, done and waited for; and progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, time

import msgspec
import pytest
import torch
from clusters import CLUSTERS, LIBRARYS_OWN, PATIENCE, Cluster, Simulated, Tcp

import phalanx
from phalanx import Backend, SimulatedBackend, SizeMismatchError
from phalanx.core.counters import Counts, OperationCounts, PeerCounts, Progress
from phalanx.core.matching import CHANNEL, CHUNK, MESSAGE

SMALL, LARGE = 64, 65_536  # elements: in shared memory, these are done in different ways
IN_MEMORY = [each for each in CLUSTERS if each.name in ("shm", "sub of shm")]
in_memory = pytest.mark.parametrize("ranks", IN_MEMORY, ids=str)


def counted(cluster: Cluster, fn: Callable[[Backend], object], size: int) -> list[Counts]:
    """What each rank has counted while it did this."""

    def run(backend: Backend) -> Counts:
        backend.counters()
        fn(backend)
        return backend.counters()

    return cluster.run(run, size)


def between(counts: list[Counts]) -> list[tuple[PeerCounts, PeerCounts]]:
    """Of any two ranks, what the one has counted of the other, and the other way round."""
    none = PeerCounts()
    known = {each.rank: each.peers for each in counts}
    return [(known[a].get(b, none), known[b].get(a, none)) for a in known for b in known if a != b]


def everything(backend: Backend) -> None:
    """Messages and collectives, in this group and in one made of it."""
    rank, size = backend.rank, backend.world_size
    backend.barrier()
    for count in (SMALL, LARGE):
        tensor = torch.ones(size * count)
        phalanx.all_reduce_(tensor, backend)
        phalanx.async_all_reduce(tensor, backend).wait()
        phalanx.all_reduce(tensor, backend, reproducible=True)
        phalanx.reduce(tensor, backend, root=size - 1)
        phalanx.reduce_scatter(tensor, backend)
        phalanx.all_gather(tensor, backend)
        phalanx.gather(tensor, backend)
        phalanx.broadcast(tensor, backend, root=1)
        phalanx.scatter(tensor if rank == 0 else None, backend, into=torch.empty(count))
        phalanx.all_to_all(tensor, backend)
    phalanx.all_gather_object({"rank": rank}, backend)
    into = bytearray(100_000)
    backend.sendrecv(bytes(100_000), (rank + 1) % size, into, (rank - 1) % size)
    half = backend.subgroup(range(2) if rank < 2 else range(2, size))
    phalanx.all_reduce_(torch.ones(SMALL), half)


def test_what_all_have_sent_all_have_received(cluster: Cluster) -> None:
    counts = counted(cluster, everything, 3)
    assert sum(each.bytes_out for each in counts) == sum(each.bytes_in for each in counts) > 0
    for mine, theirs in between(counts):
        assert mine.bytes_sent == theirs.bytes_received
        assert mine.messages_sent == theirs.messages_received
        assert mine.bytes_given == theirs.bytes_read
    assert not any(peer.bytes_kept for each in counts for peer in each.peers.values())


def test_messages_are_counted_for_their_peers(cluster: Cluster) -> None:
    """Rank r sends r + 1 messages to each of the others, of 10, 20, ... bytes."""

    def send(backend: Backend) -> None:
        here, others = backend.rank, [r for r in range(3) if r != backend.rank]
        for number in range(here + 1):
            for other in others:
                backend.isend(bytes(10 * (number + 1)), other)
        for other in others:
            for number in range(other + 1):
                backend.recv(bytearray(10 * (number + 1)), other)

    counts = counted(cluster, send, 3)
    for mine, each in enumerate(counts):
        for peer, (_, exchanged) in zip(
            [rank for rank in range(3) if rank != mine], sorted(each.peers.items()), strict=True
        ):
            assert exchanged.messages_received == peer + 1
            assert exchanged.bytes_received == 10 * sum(range(peer + 2))
            assert exchanged.bytes_given == exchanged.bytes_read == 0
    sends = [each.operations["send"].count for each in counts]
    assert sends == [2, 4, 6]
    assert [each.operations["recv"].count for each in counts] == [5, 4, 3]


@in_memory
@pytest.mark.parametrize("count", [SMALL, 3 * LARGE])
def test_what_a_collective_in_memory_reads(ranks: Cluster, count: int) -> None:
    """Of small tensors an all-reduce reads all that the others give; of large ones 2(p-1)/p."""

    def reduce(backend: Backend) -> None:
        phalanx.all_reduce_(torch.ones(count), backend)
        phalanx.all_gather(torch.ones(count), backend)
        phalanx.broadcast(torch.ones(count), backend)

    nbytes = 4 * count
    reduced = 2 * nbytes if count == SMALL else 4 * nbytes // 3
    for rank, each in enumerate(counted(ranks, reduce, 3)):
        taken = [peer.bytes_read for peer in each.peers.values()]
        assert sum(taken) == reduced + 2 * nbytes + (nbytes if rank else 0)
        assert not any(peer.messages_sent for peer in each.peers.values())


def test_operations_are_counted_by_name_with_their_time(cluster: Cluster) -> None:
    def some(backend: Backend) -> tuple[dict[str, OperationCounts], float]:
        backend.counters()
        began = monotonic()
        for _ in range(5):
            phalanx.all_reduce(torch.ones(3), backend)
        phalanx.async_broadcast(torch.ones(3), backend).wait()
        backend.barrier()
        seconds = monotonic() - began
        return backend.counters().operations, seconds

    for operations, seconds in cluster.run(some, 2):
        assert {name: each.count for name, each in operations.items()} == {
            "all_reduce": 5,
            "broadcast": 1,
            "barrier": 1,
        }
        assert 0 < sum(each.seconds for each in operations.values()) <= seconds


def test_waiting_counts_for_the_rank_that_comes_late(cluster: Cluster) -> None:
    """Rank 0 sends when the other ranks are known to wait for it."""
    ranks: dict[int, Backend] = {}

    def late(backend: Backend) -> Counts:
        backend.counters()
        ranks[backend.rank] = backend
        if backend.rank:
            backend.recv(bytearray(1), 0)
            backend.send(b"!", 0, tag=1)
            return backend.counters()
        answers = [backend.irecv(bytearray(1), peer, tag=1) for peer in (1, 2)]
        while sum(bool(each.engine.watchdog.waits) for each in list(ranks.values())) < 2:
            answers[0].done()
        for peer in (1, 2):
            backend.send(b"!", peer)
        for answer in answers:
            answer.wait()
        return backend.counters()

    _, *others = cluster.run(late, 3)
    first = ranks[0].ranks[0]
    for each in others:
        assert {rank for rank, peer in each.peers.items() if peer.seconds_waiting} == {first}
        assert 0 < each.peers[first].seconds_waiting <= each.seconds_waiting


def test_who_waits_for_long_is_seen_to_wait_meanwhile(cluster: Cluster) -> None:
    """Another rank looks at the numbers of one that waits, twice."""
    ranks: dict[int, Backend] = {}

    def look(backend: Backend) -> list[Counts]:
        backend.counters()
        ranks[backend.rank] = backend
        if backend.rank == 1:
            backend.recv(bytearray(1), 0)
            backend.send(b"!", 0, tag=1)
            return [backend.counters()]
        answer = backend.irecv(bytearray(1), 1, tag=1)
        while 1 not in ranks or not ranks[1].engine.watchdog.waits:
            answer.done()
        seen = [ranks[1].counters(), ranks[1].counters()]
        backend.send(b"!", 1)
        answer.wait()
        return seen

    seen = [each for looks in cluster.run(look, 2) for each in looks]
    waiting = [each.peers[ranks[0].ranks[0]].seconds_waiting for each in seen]
    assert 0 < waiting[0] < waiting[1] < waiting[2]


def test_waiting_in_collectives_is_counted(cluster: Cluster) -> None:
    def wait(backend: Backend) -> None:
        for _ in range(5):
            phalanx.all_reduce_(torch.ones(3), backend)
            phalanx.async_all_reduce_(torch.ones(3), backend).wait()

    counts = counted(cluster, wait, 3)
    assert any(each.seconds_waiting for each in counts)
    if not LIBRARYS_OWN.items() <= cluster.lacks.items():  # it does not say for whom
        assert any(peer.seconds_waiting for each in counts for peer in each.peers.values())


@pytest.mark.parametrize("ranks", [Simulated(), Tcp()], ids=str)
def test_a_wait_that_gives_up_counts_for_the_rank_that_did_not_come(ranks: Cluster) -> None:
    gave_up = threading.Event()

    def wait(backend: Backend) -> tuple[Counts, float]:
        backend.counters()
        began = monotonic()
        if backend.rank == 0:
            with pytest.raises(phalanx.CollectiveTimeoutError):
                backend.recv(bytearray(1), 1, timeout=0.05)
            gave_up.set()
        assert gave_up.wait(PATIENCE)
        return backend.counters(), monotonic() - began

    counts, seconds = ranks.run(wait, 2)[0]
    assert 0.05 <= counts.peers[1].seconds_waiting <= seconds
    assert counts.seconds_waiting == counts.peers[1].seconds_waiting


def test_messages_that_nobody_has_asked_for_are_kept_and_counted(cluster: Cluster) -> None:
    def keep(backend: Backend) -> tuple[int, int]:
        if backend.rank == 0:
            backend.send(bytes(1000), 1)
            backend.send(b"!", 1, tag=1)
            return 0, 0
        peer = backend.ranks[0]
        backend.recv(bytearray(1), 0, tag=1)
        kept = backend.counters().peers[peer].bytes_kept
        backend.recv(bytearray(1000), 0)
        return kept, backend.counters().peers[peer].bytes_kept

    kept, afterwards = cluster.run(keep, 2)[1]
    assert kept == 1000 + MESSAGE + CHUNK + CHANNEL  # with what it takes to keep them
    assert afterwards == 0


def test_failures_are_counted_by_their_class_from_the_start(cluster: Cluster) -> None:
    def fail(backend: Backend) -> dict[str, int]:
        if backend.rank == 0:
            backend.send(bytes(3), 1)
            backend.send(bytes(4), 1)
        else:
            with pytest.raises(SizeMismatchError):
                backend.recv(bytearray(2), 0)
            backend.recv(bytearray(4), 0)
        return backend.counters().failures

    assert cluster.run(fail, 2) == [{}, {"SizeMismatchError": 1}]


def test_counting_begins_with_the_first_call_and_is_of_all_groups_of_a_rank() -> None:
    backend = SimulatedBackend.create_group(1)[0]
    backend.barrier()
    first = backend.counters()
    assert (first.rank, first.world_size, first.operations, first.peers) == (0, 1, {}, {})
    assert first.since == pytest.approx(time(), abs=60)
    backend.subgroup([0]).barrier()
    later = backend.subgroup([0]).counters()
    assert later.operations["barrier"].count == 1
    assert later.since == first.since
    assert first.operations == {}
    assert msgspec.json.decode(msgspec.json.encode(later), type=Counts) == later


# ------------------------------------------------------------------------------
# Progress.


def test_progress_holds_the_last_step_and_the_latest_values() -> None:
    backend = SimulatedBackend.create_group(1)[0]
    nothing = backend.progress.latest
    assert (nothing.number, nothing.seconds, nothing.values) == (-1, None, {})
    backend.progress.log(0, loss=torch.tensor(2.5), lr=0.1)
    first = backend.progress.latest
    assert (first.number, first.seconds, first.values) == (0, None, {"loss": 2.5, "lr": 0.1})
    assert first.ended == pytest.approx(time(), abs=60)
    backend.subgroup([0]).progress.log(1, loss=2)
    second = backend.progress.latest
    assert (second.number, second.values) == (1, {"loss": 2.0, "lr": 0.1})
    assert second.seconds is not None
    assert second.seconds > 0
    assert first.values == {"loss": 2.5, "lr": 0.1}


def test_a_step_takes_its_part_of_the_time_since_one_was_logged() -> None:
    times = iter([10.0, 14.0, 15.0])
    progress = Progress(0, lambda: next(times))
    took = []
    for step in (0, 8, 3):
        progress.log(step)
        took.append(progress.latest.seconds)
    assert took == [None, 0.5, 1.0]


@pytest.mark.parametrize("value", ["much", None, torch.ones(2)])
def test_what_is_no_number_is_refused_and_changes_nothing(value: object) -> None:
    backend = SimulatedBackend.create_group(1)[0]
    backend.progress.log(3, loss=1.0)
    with pytest.raises(TypeError, match=r"rank 0: progress.log\(4, loss=.*takes numbers"):
        backend.progress.log(4, loss=value)  # type: ignore[arg-type]
    assert (backend.progress.latest.number, backend.progress.latest.values) == (3, {"loss": 1.0})
