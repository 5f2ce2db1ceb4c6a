"""Memory in common that cannot be had: every rank is told why, and nothing is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import Cluster, SharedMemory
from common_memory import common, files, having_memory, mappings

import phalanx
from phalanx import Backend, BackendUnavailableError, CollectiveTimeoutError, DesyncError
from phalanx.transport.shm.segments import PAGE

# What one rank does instead of `common(10)`, and which.
ODD: dict[str, tuple[int, Callable[[Backend], object]]] = {
    "another count": (0, lambda backend: backend.common(11)),
    "another dtype": (2, lambda backend: backend.common(10, torch.int32)),
    "a sum": (1, lambda backend: phalanx.all_reduce(torch.ones(10), backend, algorithm="ring")),
}


@pytest.mark.checkered
@having_memory
@pytest.mark.parametrize(("odd", "call"), ODD.values(), ids=ODD.keys())
def test_ranks_that_disagree_are_told(
    cluster: Cluster, odd: int, call: Callable[[Backend], object]
) -> None:
    def disagree(backend: Backend) -> None:
        group = backend.subgroup(range(3))
        with pytest.raises(DesyncError, match=r"common #0 \(float32 \[10\]\)"):
            call(group) if group.rank == odd else group.common(10)
        backend.barrier()

    cluster.run(disagree, 3, timeout=15.0)


@having_memory
@pytest.mark.timeouts
def test_a_rank_that_does_not_call_is_named(cluster: Cluster) -> None:
    absent = 2  # rank 1 waits for rank 0, and that for rank 2
    given_up = threading.Barrier(3)

    def wait(backend: Backend) -> int | None:
        named = None
        if backend.rank != absent:
            with pytest.raises(CollectiveTimeoutError, match=r"common #0 \(float32 \[10\]\)") as it:
                backend.common(10, timeout=1.0)  # of which a quarter is for questions
            named = it.value.peer
        given_up.wait(20)
        return named

    assert [peer for peer in cluster.run(wait, 3) if peer is not None] == [absent] * 2


@having_memory
def test_more_than_there_is_is_refused_on_all_ranks_alike_and_the_group_goes_on(
    cluster: Cluster,
) -> None:
    def ask(backend: Backend) -> None:
        for _ in range(2):
            with pytest.raises(BackendUnavailableError, match=r"281,474,976,710,656 bytes") as it:
                backend.common(1 << 48, torch.uint8)
            assert (it.value.rank, it.value.op) == (backend.rank, "common")
            assert it.value.peer == (None if backend.rank == 0 else 0)
        assert common(backend, 3).numel() == 3

    cluster.run(ask, 3)


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 cannot make a file."""
    refuse(monkeypatch, "memfd_create", "rank 0")


def no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot open one."""
    refuse(monkeypatch, "open", "rank 1")


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, rank: str) -> None:
    plain = getattr(os, call)

    def refused(*args: Any, **options: Any) -> int:
        if threading.current_thread().name == rank:
            raise OSError(24, "Too many open files")
        return plain(*args, **options)

    monkeypatch.setattr(os, call, refused)


@pytest.mark.parametrize(("trouble", "blamed"), [(no_memory, 0), (no_descriptors, 1)])
def test_what_keeps_one_rank_from_it_is_told_to_all_and_nothing_is_left(
    trouble: Callable[[pytest.MonkeyPatch], None], blamed: int
) -> None:
    size = 1001 * PAGE

    def ask(backend: Backend) -> None:
        backend.barrier()
        with pytest.MonkeyPatch.context() as monkeypatch:
            if backend.rank == blamed:
                trouble(monkeypatch)
            backend.barrier()
            with pytest.raises(
                BackendUnavailableError, match=rf"rank {blamed} cannot.*Too many open files"
            ) as it:
                backend.common(size, torch.uint8)
            assert it.value.peer == (None if backend.rank == blamed else blamed)
            backend.barrier()
        assert (mappings(size), files(size)) == (0, 0)
        backend.barrier()
        assert common(backend, size, torch.uint8).sum() == 0

    SharedMemory().run(ask, 3)


@having_memory
def test_wrong_arguments_are_refused_before_anything_is_sent(cluster: Cluster) -> None:
    def ask(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(ValueError, match="-1 elements"):
                backend.common(-1)
            with pytest.raises(ValueError, match="timeout"):
                backend.common(1, timeout=0)
            with pytest.raises(TypeError):
                backend.common(1.5)  # type: ignore[arg-type]
        assert common(backend, 1).numel() == 1

    cluster.run(ask, 2)
