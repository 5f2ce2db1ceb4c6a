"""The barrier, on every kind of backend."""

from __future__ import annotations

import threading

import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import Backend


@pytest.mark.checkered
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_nobody_leaves_before_everybody_has_come(cluster: Cluster, size: int) -> None:
    came: list[set[int]] = [set() for _ in range(8)]

    def epoch(backend: Backend) -> None:
        for here in came:
            here.add(backend.rank)
            backend.barrier()
            assert here == set(range(size))

    cluster.run(epoch, size)


@pytest.mark.checkered
@pytest.mark.parametrize("last", range(4))
def test_whoever_comes_last_holds_up_all_the_others(cluster: Cluster, last: int) -> None:
    """The last one comes only when it has heard that each of the others is at the barrier."""
    left: list[int] = []

    def epoch(backend: Backend) -> None:
        if backend.rank == last:
            for other in range(4):
                if other != last:
                    backend.recv(bytearray(1), other)
            assert left == []
            backend.barrier()
        else:
            pending = phalanx.async_barrier(backend)
            backend.send(b"!", last)
            pending.wait()
        left.append(backend.rank)

    cluster.run(epoch, 4)


def test_barriers_and_messages_do_not_mix(cluster: Cluster) -> None:
    def epoch(backend: Backend) -> None:
        other = 1 - backend.rank
        into = bytearray(1)
        backend.send(b"a", other)
        backend.barrier()
        backend.send(b"b", other)
        phalanx.barrier(backend, timeout=10)
        backend.recv(into, other)
        assert into == b"a"
        backend.barrier()
        backend.recv(into, other)
        assert into == b"b"

    cluster.run(epoch, 2)


def test_an_async_barrier_is_done_only_when_all_have_come(cluster: Cluster) -> None:
    def epoch(backend: Backend) -> None:
        if backend.rank == 0:
            pending = phalanx.async_barrier(backend)
            assert pending.op_name == "barrier"
            for _ in range(5):
                assert not pending.done()
            backend.send(b"now", 1)
            assert pending.wait() is None
            assert pending.done()
            return
        backend.recv(bytearray(3), 0)
        backend.barrier()

    cluster.run(epoch, 2)


def test_barriers_of_overlapping_groups_hold_up_only_their_members(cluster: Cluster) -> None:
    def epoch(backend: Backend) -> None:
        groups = [backend.subgroup({0, 1}), backend.subgroup({0, 2})] if backend.rank == 0 else []
        if backend.rank:
            groups = [backend.subgroup({0, backend.rank})]
        for group in reversed(groups):
            group.barrier()
        backend.barrier()

    cluster.run(epoch, 3)


@pytest.mark.timeouts
def test_two_threads_of_a_rank_may_wait_at_once(cluster: Cluster) -> None:
    """Each of them for something else; whichever ends first does not strand the other."""

    def wait_twice(backend: Backend) -> list[bytes]:
        other = 1 - backend.rank
        got: list[bytes] = []

        def receive(tag: int) -> None:
            into = bytearray(1)
            backend.recv(into, other, tag=tag)
            got.append(bytes(into))
            backend.send(into, other, tag=tag + 2)

        threads = [threading.Thread(target=receive, args=(tag,)) for tag in (0, 1)]
        for thread in threads:
            thread.start()
        backend.barrier()
        for tag in (1, 0):
            backend.send(bytes([tag + 65]), other, tag=tag)
            backend.recv(bytearray(1), other, tag=tag + 2)
        for thread in threads:
            thread.join()
        backend.barrier()
        return sorted(got)

    assert cluster.run(wait_twice, 2) == [[b"A", b"B"]] * 2


def test_the_time_spent_waiting_is_counted(cluster: Cluster) -> None:
    def epoch(backend: Backend) -> tuple[float, float]:
        before = backend.seconds_waiting
        for _ in range(3):
            phalanx.all_reduce(torch.ones(3), backend)
        return before, backend.seconds_waiting

    assert all(before <= after for before, after in cluster.run(epoch, 3))
    assert any(after > 0 for _, after in cluster.run(epoch, 3))


def test_what_a_group_waits_its_parents_wait(cluster: Cluster) -> None:
    def epoch(backend: Backend) -> tuple[float, float, float]:
        parent = backend.subgroup([0, 1, 2])
        group = parent.subgroup([0, 1, 2])
        for _ in range(3):
            phalanx.async_all_reduce(torch.ones(3), group).wait()
        return group.seconds_waiting, parent.seconds_waiting, backend.seconds_waiting

    waited = cluster.run(epoch, 3)
    assert any(group > 0 for group, _, _ in waited)
    assert all(group <= parent <= backend for group, parent, backend in waited)
