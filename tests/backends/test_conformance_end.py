"""The end of a backend: close, abort, `with`, and what comes after, on every kind of backend."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress

import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import Backend, MisuseError


def refused(backend: Backend) -> None:
    """Whatever is called on a closed backend says that it is closed."""
    peer = 1 - backend.rank
    for call in (
        backend.barrier,
        lambda: backend.send(b"x", peer),
        lambda: backend.recv(bytearray(1), peer),
        lambda: backend.sendrecv(b"x", peer, bytearray(1), peer),
        lambda: phalanx.all_reduce(torch.ones(2), backend),
        lambda: phalanx.async_all_gather(torch.ones(2), backend),
        lambda: phalanx.async_barrier(backend),
    ):
        with pytest.raises(MisuseError, match="closed") as info:
            call()
        assert info.value.rank == backend.rank
        assert info.value.op in ("barrier", "send", "recv", "sendrecv", "all_reduce", "all_gather")


def test_every_call_after_close_is_misuse(cluster: Cluster) -> None:
    def close(backend: Backend) -> None:
        backend.barrier()
        backend.close()
        refused(backend)

    cluster.run(close, 2)


def test_every_call_after_abort_is_misuse(cluster: Cluster) -> None:
    def abort(backend: Backend) -> None:
        other = 1 - backend.rank
        with suppress(phalanx.PeerLostError):  # the other one may be quicker
            backend.sendrecv(b"!", other, bytearray(1), other)
        backend.abort()
        refused(backend)

    cluster.run(abort, 2)


def test_close_and_abort_may_be_repeated_in_any_order(cluster: Cluster) -> None:
    def close(backend: Backend) -> None:
        backend.barrier()
        for end in (backend.close, backend.close, backend.abort, backend.close, backend.abort):
            end()
        refused(backend)

    cluster.run(close, 2)


def test_with_closes(cluster: Cluster) -> None:
    def use(backend: Backend) -> float:
        with backend as same:
            assert same is backend
            total = phalanx.all_reduce(torch.ones(1), backend).item()
        refused(backend)
        return total

    assert cluster.run(use, 2) == [2.0, 2.0]


def test_with_lets_errors_through(cluster: Cluster) -> None:
    def fail(backend: Backend) -> None:
        backend.barrier()
        with pytest.raises(KeyError, match="mine"), backend:
            raise KeyError("mine")
        refused(backend)

    cluster.run(fail, 2)


def test_a_subgroup_ends_with_its_parent(cluster: Cluster) -> None:
    def close(backend: Backend) -> None:
        inner = backend.subgroup([0, 1])
        inmost = inner.subgroup([0, 1])
        phalanx.all_reduce(torch.ones(1), inmost)
        backend.barrier()
        backend.close()
        refused(inner)
        refused(inmost)

    cluster.run(close, 2)


def test_a_closed_backend_makes_no_subgroups_that_work(cluster: Cluster) -> None:
    def close(backend: Backend) -> None:
        backend.barrier()
        backend.close()
        with pytest.raises(MisuseError, match="closed"):
            backend.subgroup([0, 1]).barrier(timeout=2)

    cluster.run(close, 2)


def test_closing_ends_what_is_outstanding(cluster: Cluster) -> None:
    def close(backend: Backend) -> None:
        backend.barrier()
        if backend.rank == 0:
            pending = [phalanx.async_all_reduce(torch.ones(2), backend) for _ in range(3)]
            backend.close()
            for each in pending:
                assert each.done()
                for _ in range(2):
                    with pytest.raises(MisuseError, match=r"all_reduce #\d.*closed"):
                        each.wait()

    cluster.run(close, 2)


@pytest.mark.checkered
@pytest.mark.timeouts
@pytest.mark.parametrize("end", ["close", "abort"])
def test_another_thread_may_close_while_one_waits(cluster: Cluster, end: str) -> None:
    def close(backend: Backend) -> None:
        if backend.rank == 1:
            backend.barrier()
            return
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                backend.recv(bytearray(1), 1)
            except MisuseError as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        backend.barrier()  # the two wait at once for a moment
        getattr(backend, end)()
        waiting.join(10)
        assert not waiting.is_alive()
        assert len(caught) == 1

    cluster.run(close, 2)


def test_a_finished_result_outlives_its_backend(cluster: Cluster) -> None:
    def close(backend: Backend) -> list[float]:
        pending = phalanx.async_all_reduce(torch.ones(2), backend)
        backend.barrier()
        backend.barrier()
        backend.close()
        return pending.wait().tolist()

    assert cluster.run(close, 2) == [[2.0, 2.0]] * 2


@pytest.mark.requires("descriptors")
def test_a_closed_group_has_no_descriptors_without_the_garbage_collector_too(
    cluster: Cluster,
) -> None:
    """A program that forms groups again and again would run out of them."""

    def use(backend: Backend) -> None:
        phalanx.all_reduce(torch.ones(1 << 20), backend)
        phalanx.all_reduce(torch.ones(2), backend.subgroup(range(2)))

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    cluster.run(use, 2)  # what is made once for all is there
    gc.collect()
    gc.disable()
    try:
        before = open_files()
        for _ in range(3):
            cluster.run(use, 2)
        assert open_files() == before
    finally:
        gc.enable()
