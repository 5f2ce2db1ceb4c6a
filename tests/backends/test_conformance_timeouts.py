"""Deadlines, on every kind of backend in which time passes."""

from __future__ import annotations

import logging
import threading
from time import sleep

import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import Backend, CollectiveTimeoutError

pytestmark = [pytest.mark.timeouts, pytest.mark.together]


def test_a_receive_past_its_timeout_says_who_what_and_how_long(cluster: Cluster) -> None:
    def wait_in_vain(backend: Backend) -> None:
        if backend.rank != 1:
            backend.barrier()
            return
        for number in range(2):
            with pytest.raises(CollectiveTimeoutError) as info:
                backend.recv(bytearray(1), 2, tag=7, timeout=0.15)
            error = info.value
            assert isinstance(error, TimeoutError)
            assert (error.rank, error.peer, error.op) == (1, 2, "recv")
            assert (error.sequence, error.seconds) == (number, 0.15)
            for part in ("rank 1", "recv", f"#{number}", "tag 7", "0.15 s", "rank 2"):
                assert part in str(error)
        backend.barrier()

    cluster.run(wait_in_vain, 3)


def test_the_backends_own_timeout_counts_where_none_is_given(cluster: Cluster) -> None:
    def wait_in_vain(backend: Backend) -> None:
        assert backend.timeout == 13.25
        if backend.rank == 0:
            backend.timeout = 0.125
            with pytest.raises(CollectiveTimeoutError, match=r"0\.125 s") as info:
                backend.recv(bytearray(1), 1)
            assert info.value.seconds == 0.125
            backend.timeout = 13.25
        backend.barrier()

    cluster.run(wait_in_vain, 2, timeout=13.25)


@pytest.mark.parametrize("size", [0, 1, 5 << 20])
def test_a_message_that_comes_after_the_timeout_is_not_lost(cluster: Cluster, size: int) -> None:
    def late(backend: Backend) -> None:
        go, into = bytearray(1), bytearray(size)
        if backend.rank == 0:
            backend.recv(go, 1, tag=1)
            backend.send(b"\1" * size, 1)
            backend.send(b"\2" * size, 1)
            return
        for _ in range(3):
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(into, 0, timeout=0.05)
        backend.send(go, 0, tag=1)
        backend.recv(into, 0)
        assert into == b"\1" * size
        backend.recv(into, 0)
        assert into == b"\2" * size

    cluster.run(late, 2)


def test_a_timed_out_receive_does_not_touch_its_memory_any_more(cluster: Cluster) -> None:
    def late(backend: Backend) -> None:
        if backend.rank == 0:
            backend.recv(bytearray(1), 1)
            backend.send(b"late", 1)
            backend.barrier()
            return
        given_up, into = bytearray(b"mine"), bytearray(4)
        with pytest.raises(CollectiveTimeoutError):
            backend.recv(given_up, 0, timeout=0.05)
        backend.send(b"!", 0)
        backend.barrier()
        backend.recv(into, 0)
        assert (given_up, into) == (b"mine", b"late")

    cluster.run(late, 2)


def test_a_timed_out_message_breaks_nothing(cluster: Cluster) -> None:
    def wait_in_vain(backend: Backend) -> float:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError):
                backend.sendrecv(b"?", 1, bytearray(1), 1, timeout=0.05)
        return float(phalanx.all_reduce(torch.ones(1), backend))

    assert cluster.run(wait_in_vain, 2) == [2.0, 2.0]


def test_a_long_wait_says_in_the_log_for_whom_and_goes_on(cluster: Cluster) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if label in record.getMessage():  # other clusters run beside this one
                texts.append(record.getMessage())
                warned.set()

    def come_late(backend: Backend) -> float:
        if backend.rank == 0:
            backend.engine.watchdog.warn_after = 0.05
        elif not warned.wait(30):
            return 0.0
        return float(phalanx.all_reduce(torch.ones(1), backend, label=label, timeout=1800))

    label = f"<{cluster}>"
    texts: list[str] = []
    warned, handler = threading.Event(), Handler()
    log = logging.getLogger("phalanx")
    log.addHandler(handler)
    try:
        assert cluster.run(come_late, 2) == [2.0, 2.0]
    finally:
        log.removeHandler(handler)
    (text,) = texts
    for part in ("rank 0", ": all_reduce #", "test_conformance_timeouts.py", "0.05 s for rank 1"):
        assert part in text


def test_a_collective_past_its_timeout_says_who_what_and_how_long(cluster: Cluster) -> None:
    gave_up = threading.Event()

    def miss(backend: Backend) -> None:
        if backend.rank == 1:
            assert gave_up.wait(30)
            return
        with pytest.raises(CollectiveTimeoutError) as info:
            phalanx.all_reduce(torch.ones(3), backend, algorithm="ring", timeout=0.25)
        gave_up.set()
        error = info.value
        assert (error.rank, error.peer, error.op) == (0, 1, "all_reduce")
        assert (error.sequence, error.seconds) == (0, 0.25)
        for part in ("rank 0", "all_reduce #0", "float32 [3]", "0.25 s", "rank 1"):
            assert part in str(error)

    cluster.run(miss, 2)


def test_after_a_timeout_of_a_collective_every_later_call_raises_the_first_cause(
    cluster: Cluster,
) -> None:
    gave_up = threading.Event()

    def miss(backend: Backend) -> None:
        if backend.rank == 1:
            assert gave_up.wait(30)
            return
        with pytest.raises(CollectiveTimeoutError):
            backend.barrier(timeout=0.1)
        for call in (
            backend.barrier,
            lambda: phalanx.all_reduce(torch.ones(1), backend),
            lambda: phalanx.async_broadcast(torch.ones(1), backend),
            lambda: backend.send(b"x", 1),
            lambda: backend.recv(bytearray(1), 1),
        ):
            with pytest.raises(CollectiveTimeoutError, match=r"broken.*barrier #0") as info:
                call()
            assert info.value.peer == 1
        gave_up.set()

    cluster.run(miss, 2)


def test_a_rank_that_comes_after_the_others_gave_up_learns_why(cluster: Cluster) -> None:
    """It must not wait for those who have gone: the seconds in its error would be its own 5."""

    def come_late(backend: Backend) -> None:
        inner = backend.subgroup(range(backend.world_size))
        phalanx.all_reduce(torch.ones(8), inner)  # a library forms its group at the first one
        if backend.rank:
            with pytest.raises(CollectiveTimeoutError):
                phalanx.all_reduce(torch.ones(8), inner, timeout=0.2)
        backend.barrier()
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError) as info:
                phalanx.all_reduce(torch.ones(8), inner, timeout=5)
            assert info.value.seconds != 5, info.value
        backend.barrier()

    for size in (2, 3, 4):
        cluster.run(come_late, size)


def test_an_async_collective_fails_by_its_timeout_while_nobody_waits_for_it(
    cluster: Cluster,
) -> None:
    gave_up = threading.Event()

    def miss(backend: Backend) -> None:
        if backend.rank == 1:
            assert gave_up.wait(30)
            return
        first = phalanx.async_all_reduce(torch.ones(3), backend, timeout=0.5)
        second = phalanx.async_all_gather(torch.ones(3), backend, timeout=30)
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError):
                second.wait()
            with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #0.* 0\.5 s"):
                first.wait()
        assert first.done()
        assert second.done()
        gave_up.set()

    cluster.run(miss, 2)


def test_wait_can_be_given_another_timeout(cluster: Cluster) -> None:
    gave_up = threading.Event()

    def miss(backend: Backend) -> None:
        if backend.rank == 1:
            assert gave_up.wait(30)
            return
        pending = phalanx.async_barrier(backend)
        with pytest.raises(CollectiveTimeoutError, match=r"0\.1 s") as info:
            pending.wait(timeout=0.1)
        assert info.value.seconds == 0.1
        gave_up.set()

    cluster.run(miss, 2)


def test_another_timeout_counts_from_the_wait(cluster: Cluster) -> None:
    waits = threading.Event()

    def late(backend: Backend) -> None:
        if backend.rank == 1:
            assert waits.wait(30)
            sleep(0.1)  # the other rank waits meanwhile, with a deadline in the future
            backend.send(b"!", 0)
            return
        pending = backend.irecv(into := bytearray(1), 1)
        waits.set()
        assert pending.wait(timeout=30) == 1
        assert into == b"!"

    cluster.run(late, 2)


def test_a_timeout_in_a_subgroup_leaves_the_parent_usable(cluster: Cluster) -> None:
    def wait_in_vain(backend: Backend) -> float:
        inner = backend.subgroup([0, 2]) if backend.rank != 1 else None
        if inner is not None:
            phalanx.all_reduce(torch.ones(4), inner)  # a library forms its group at the first one
        if backend.rank == 2:
            assert inner is not None
            with pytest.raises(CollectiveTimeoutError, match=r"ranks \[") as info:
                phalanx.all_reduce(torch.ones(4), inner, timeout=0.1)
            assert (info.value.rank, info.value.peer) == (1, 0), "numbers are the subgroup's"
        return float(phalanx.all_reduce(torch.ones(1), backend))

    assert cluster.run(wait_in_vain, 3) == [3.0] * 3
