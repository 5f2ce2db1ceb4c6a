"""Memory that ranks have in common, on every kind of backend that has any."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import Cluster, Hybrid, SharedMemory, Simulated
from torch import Tensor

import phalanx
from phalanx import (
    Backend,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DesyncError,
    MisuseError,
    SimulatedBackend,
)
from phalanx.backends.shm.segment import PAGE

having_memory = pytest.mark.requires("memory")


def common(backend: Backend, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    memory = backend.common(count, dtype)
    assert memory is not None
    return memory


# What it is ---------------------------------------------------------------------------------


@having_memory
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_one_writes_the_others_see_after_a_barrier(cluster: Cluster, size: int) -> None:
    def share(backend: Backend) -> None:
        memory = common(backend, 1000 * size)
        mine = memory[1000 * backend.rank : 1000 * (backend.rank + 1)]
        for turn in range(5):
            mine.fill_(10 * turn + backend.rank)
            backend.barrier()
            ranks = torch.arange(float(size)).repeat_interleave(1000)
            assert torch.equal(memory, 10 * turn + ranks)
            backend.barrier()

    cluster.run(share, size)


@having_memory
def test_every_collective_in_which_ranks_wait_for_each_other_will_do(cluster: Cluster) -> None:
    def share(backend: Backend) -> None:
        memory = common(backend, 3, torch.int64)
        for turn in range(10):
            memory[backend.rank] = turn
            phalanx.all_reduce(torch.ones(10_000 * (turn % 2)), backend, algorithm="auto")
            phalanx.all_gather(torch.ones(1), backend)
            assert memory.tolist() == [turn] * 3
            phalanx.async_barrier(backend).wait()

    cluster.run(share, 3)


@having_memory
def test_a_message_tells_of_what_its_sender_has_written(cluster: Cluster) -> None:
    def share(backend: Backend) -> None:
        memory, other = common(backend, 1 << 16), 1 - backend.rank
        for turn in range(5):
            if backend.rank == 0:
                memory.fill_(turn)
                backend.send(b"!", other)
                backend.recv(bytearray(1), other)
            else:
                backend.recv(bytearray(1), other)
                assert bool((memory == turn).all())
                backend.send(b"!", other)

    cluster.run(share, 2)


@having_memory
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_it_has_the_elements_that_were_asked_for_and_they_are_zero(
    cluster: Cluster, count: int
) -> None:
    def share(backend: Backend) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
            memory = common(backend, count, dtype)
            assert (memory.shape, memory.dtype) == ((count,), dtype)
            assert memory.is_contiguous()
            assert not memory.any()
            backend.barrier()
            if backend.rank == 1:
                memory.fill_(1)
            backend.barrier()
            assert memory.sum() == count

    cluster.run(share, 2)


@having_memory
def test_two_of_them_do_not_overlap(cluster: Cluster) -> None:
    def share(backend: Backend) -> None:
        pieces = [common(backend, 100 + n) for n in range(3)]
        for n, piece in enumerate(pieces):
            if backend.rank == n % 2:
                piece.fill_(n)
        backend.barrier()
        for n, piece in enumerate(pieces):
            assert piece.tolist() == [n] * (100 + n)

    cluster.run(share, 2)


@having_memory
def test_overlapping_groups_have_their_own(cluster: Cluster) -> None:
    def share(backend: Backend) -> None:
        rank = backend.rank
        groups = [backend.subgroup(ranks) for ranks in ([0, 1], [1, 2], [0, 1]) if rank in ranks]
        pieces = [common(group, 10) for group in groups]
        for group, piece in zip(groups, pieces, strict=True):
            piece[5 * group.rank : 5 * group.rank + 5] = rank
        for group, piece in zip(groups, pieces, strict=True):
            group.barrier()
            first, second = group.to_global(0), group.to_global(1)
            assert piece.tolist() == [first] * 5 + [second] * 5

    cluster.run(share, 3)


@having_memory
def test_it_comes_in_the_order_of_the_groups_collectives(cluster: Cluster) -> None:
    def share(backend: Backend) -> None:
        before = phalanx.async_all_reduce(torch.ones(3), backend)
        memory = common(backend, 3)
        after = phalanx.async_all_gather(torch.ones(1), backend)
        assert before.wait().tolist() == [3] * 3
        memory[backend.rank] = 1
        assert after.wait().tolist() == [1] * 3
        backend.barrier()
        assert memory.tolist() == [1] * 3

    cluster.run(share, 3)


@having_memory
def test_a_tensor_of_one_rank_does_not_count_anothers_changes(cluster: Cluster) -> None:
    """As if they were processes: autograd sees what this rank does, and nothing else."""

    def share(backend: Backend) -> None:
        memory = common(backend, 3).fill_(2)
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * memory).sum()
        backend.barrier()
        if backend.rank == 0:
            memory.fill_(3)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        backend.barrier()

    cluster.run(share, 2)


# Where there is none ------------------------------------------------------------------------


def test_where_ranks_have_none_each_knows_without_a_message(cluster: Cluster) -> None:
    def ask(backend: Backend) -> bool:
        if "memory" not in cluster.lacks:
            return common(backend, 5).numel() == 5
        for turn in range(3):  # not as often on all: nobody waits for anybody
            if turn <= backend.rank:
                assert backend.common(5 + backend.rank) is None
        backend.barrier()
        return True

    assert cluster.run(ask, 3) == [True] * 3


def test_a_rank_alone_has_its_own(cluster: Cluster) -> None:
    def ask(backend: Backend) -> list[float]:
        memory = common(backend.subgroup([backend.rank]), 3)
        memory += backend.rank
        backend.barrier()
        return memory.tolist()

    assert cluster.run(ask, 2) == [[0] * 3, [1] * 3]


def test_ranks_of_one_host_of_several_have_theirs() -> None:
    def ask(backend: Backend) -> list[float]:
        assert backend.common(10) is None
        host = backend.subgroup([rank for rank in range(4) if rank % 2 == backend.rank % 2])
        memory = common(host, 2)
        memory[host.rank] = backend.rank
        host.barrier()
        return memory.tolist()

    assert Hybrid().run(ask, 4) == [[0, 2], [1, 3]] * 2


# What goes wrong ----------------------------------------------------------------------------

# What one rank does instead of `common(10)`, and which.
ODD: dict[str, tuple[int, Callable[[Backend], object]]] = {
    "another count": (0, lambda backend: backend.common(11)),
    "another dtype": (2, lambda backend: backend.common(10, torch.int32)),
    "a sum": (1, lambda backend: phalanx.all_reduce(torch.ones(10), backend, algorithm="ring")),
}


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
                backend.common(10, timeout=0.3)
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


# How long it lives --------------------------------------------------------------------------


def mappings(size: int) -> int:
    """How often memory without a name and of this size is mapped by this process."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:phalanx" in line:
            start, stop = line.split()[0].split("-")
            found += int(stop, 16) - int(start, 16) == size
    return found


def files(size: int) -> int:
    """How many files of that kind this process has open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            named = "memfd:phalanx" in os.readlink(f"/proc/self/fd/{number}")
            found += named and os.fstat(int(number)).st_size == size
    return found


@having_memory
def test_it_outlives_the_backends(cluster: Cluster) -> None:
    first, second = cluster.run(lambda backend: common(backend, 1000), 2)
    first.fill_(1)
    second[:500] += 1
    assert first.sum() == second.sum() == 1500


@having_memory
def test_a_closed_backend_gives_no_more(cluster: Cluster) -> None:
    def close(backend: Backend) -> None:
        memory = common(backend, 10)
        memory[5 * backend.rank :][:5] = 1
        backend.barrier()
        backend.close()
        with pytest.raises(MisuseError):
            backend.common(10)
        assert memory.sum() == 10

    cluster.run(close, 2)


def test_each_ranks_mapping_goes_with_its_last_view() -> None:
    size = 1002 * PAGE

    def share(backend: Backend) -> None:
        memory = common(backend, size, torch.uint8)
        view = memory[1000:2000].view(10, 100).t()
        del memory
        backend.barrier()
        assert (mappings(size), files(size)) == (2, 0)
        backend.barrier()
        if backend.rank == 0:
            del view
        backend.barrier()
        assert mappings(size) == 1
        backend.barrier()
        if backend.rank == 1:
            del view
        backend.barrier()
        assert mappings(size) == 0

    SharedMemory().run(share, 2)


def test_nothing_is_left_of_a_hundred_of_them() -> None:
    size = 1003 * PAGE

    def share(backend: Backend) -> None:
        for number in range(100):
            memory = common(backend, size, torch.uint8)
            memory[backend.rank] = number
        del memory
        backend.barrier()
        assert (mappings(size), files(size)) == (0, 0)

    SharedMemory().run(share, 2)


def test_nothing_is_left_of_those_that_came_to_nothing() -> None:
    size = 1004 * PAGE

    def disagree(backend: Backend) -> None:
        for odd in range(3):
            group = backend.subgroup(range(3))
            with pytest.raises(DesyncError):
                group.common(size + (group.rank == odd), torch.uint8)
            backend.barrier()
        assert (mappings(size), files(size)) == (0, 0)

    SharedMemory().run(disagree, 3)


def test_what_threads_have_in_common_is_not_kept_either() -> None:
    def share(backend: Backend) -> int:
        storage = common(backend, 10).untyped_storage()
        backend.barrier()
        with pytest.raises(BackendUnavailableError):
            backend.common(1 << 48)
        backend.barrier()
        assert isinstance(backend, SimulatedBackend)
        assert not backend.hub.shelf.storages
        return storage.data_ptr()

    assert len(set(Simulated().run(share, 3))) == 1
