"""Memory that ranks have in common, on every kind of backend that has any."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
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

# Hybrid: the ranks of these tests are on two hosts.
NONE_IN_COMMON = ("tcp", "sub of tcp", "gloo", "hybrid")


@pytest.fixture
def sharing(cluster: Cluster) -> Cluster:
    """A cluster whose ranks have memory in common."""
    if cluster.name in NONE_IN_COMMON:
        pytest.skip("its ranks have no memory in common")
    return cluster


def common(backend: Backend, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    memory = backend.common(count, dtype)
    assert memory is not None
    return memory


# What it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_one_writes_the_others_see_after_a_barrier(sharing: Cluster, size: int) -> None:
    def share(backend: Backend) -> None:
        memory = common(backend, 1000 * size)
        mine = memory[1000 * backend.rank : 1000 * (backend.rank + 1)]
        for turn in range(5):
            mine.fill_(10 * turn + backend.rank)
            backend.barrier()
            ranks = torch.arange(float(size)).repeat_interleave(1000)
            assert torch.equal(memory, 10 * turn + ranks)
            backend.barrier()

    sharing.run(share, size)


def test_every_collective_in_which_ranks_wait_for_each_other_will_do(sharing: Cluster) -> None:
    def share(backend: Backend) -> None:
        memory = common(backend, 3, torch.int64)
        for turn in range(10):
            memory[backend.rank] = turn
            phalanx.all_reduce(torch.ones(10_000 * (turn % 2)), backend, algorithm="auto")
            phalanx.all_gather(torch.ones(1), backend)
            assert memory.tolist() == [turn] * 3
            phalanx.async_barrier(backend).wait()

    sharing.run(share, 3)


def test_a_message_tells_of_what_its_sender_has_written(sharing: Cluster) -> None:
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

    sharing.run(share, 2)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_it_has_the_elements_that_were_asked_for_and_they_are_zero(
    sharing: Cluster, count: int
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

    sharing.run(share, 2)


def test_two_of_them_do_not_overlap(sharing: Cluster) -> None:
    def share(backend: Backend) -> None:
        pieces = [common(backend, 100 + n) for n in range(3)]
        for n, piece in enumerate(pieces):
            if backend.rank == n % 2:
                piece.fill_(n)
        backend.barrier()
        for n, piece in enumerate(pieces):
            assert piece.tolist() == [n] * (100 + n)

    sharing.run(share, 2)


def test_overlapping_groups_have_their_own(sharing: Cluster) -> None:
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

    sharing.run(share, 3)


def test_it_comes_in_the_order_of_the_groups_collectives(sharing: Cluster) -> None:
    def share(backend: Backend) -> None:
        before = phalanx.async_all_reduce(torch.ones(3), backend)
        memory = common(backend, 3)
        after = phalanx.async_all_gather(torch.ones(1), backend)
        assert before.wait().tolist() == [3] * 3
        memory[backend.rank] = 1
        assert after.wait().tolist() == [1] * 3
        backend.barrier()
        assert memory.tolist() == [1] * 3

    sharing.run(share, 3)


def test_a_tensor_of_one_rank_does_not_count_anothers_changes(sharing: Cluster) -> None:
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

    sharing.run(share, 2)


# Where there is none ------------------------------------------------------------------------


def test_where_ranks_have_none_each_knows_without_a_message(cluster: Cluster) -> None:
    def ask(backend: Backend) -> bool:
        if cluster.name not in NONE_IN_COMMON:
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

ODD: dict[str, Callable[[Backend], object]] = {
    "another count": lambda backend: backend.common(11),
    "another dtype": lambda backend: backend.common(10, torch.int32),
    "a barrier": lambda backend: backend.barrier(),
    "all_reduce": lambda backend: phalanx.all_reduce(torch.ones(10), backend),
}


@pytest.mark.parametrize("call", ODD.values(), ids=ODD.keys())
def test_ranks_that_disagree_are_told(sharing: Cluster, call: Callable[[Backend], object]) -> None:
    def disagree(backend: Backend) -> None:
        for odd in range(3):
            group = backend.subgroup(range(3))
            with pytest.raises(DesyncError):
                (call if group.rank == odd else ODD["another count"])(group)
                group.barrier()  # who does not wait learns at its next call
            backend.barrier()

    def check(backend: Backend) -> None:
        if call is not ODD["another count"]:
            disagree(backend)

    sharing.run(check, 3, timeout=15.0)


@pytest.mark.timeouts
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_call_is_named(sharing: Cluster, absent: int) -> None:
    def wait(backend: Backend) -> int | None:
        group = backend.subgroup(range(3))
        named = None
        if backend.rank != absent:
            with pytest.raises(CollectiveTimeoutError, match=r"common #0 \(float32 \[10\]\)") as it:
                group.common(10, timeout=0.3)
            named = it.value.peer
        backend.barrier()
        return named

    assert [peer for peer in sharing.run(wait, 3) if peer is not None] == [absent] * 2


def test_more_than_there_is_is_refused_on_all_ranks_alike_and_the_group_goes_on(
    sharing: Cluster,
) -> None:
    def ask(backend: Backend) -> None:
        for _ in range(2):
            with pytest.raises(BackendUnavailableError, match=r"281,474,976,710,656 bytes") as it:
                backend.common(1 << 48, torch.uint8)
            assert (it.value.rank, it.value.op) == (backend.rank, "common")
            assert it.value.peer == (None if backend.rank == 0 else 0)
        assert common(backend, 3).numel() == 3

    sharing.run(ask, 3)


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
    def ask(backend: Backend) -> None:
        backend.barrier()
        before = (pieces(), files())
        backend.barrier()
        with pytest.MonkeyPatch.context() as monkeypatch:
            if backend.rank == blamed:
                trouble(monkeypatch)
            backend.barrier()
            with pytest.raises(
                BackendUnavailableError, match=rf"rank {blamed} cannot.*Too many open files"
            ) as it:
                backend.common(1000)
            assert it.value.peer == (None if backend.rank == blamed else blamed)
            backend.barrier()
        assert (pieces(), files()) == before
        backend.barrier()
        assert common(backend, 1000).sum() == 0

    SharedMemory().run(ask, 3)


def test_wrong_arguments_are_refused_before_anything_is_sent(sharing: Cluster) -> None:
    def ask(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(ValueError, match="-1 elements"):
                backend.common(-1)
            with pytest.raises(ValueError, match="timeout"):
                backend.common(1, timeout=0)
            with pytest.raises(TypeError):
                backend.common(1.5)  # type: ignore[arg-type]
        assert common(backend, 1).numel() == 1

    sharing.run(ask, 2)


# How long it lives --------------------------------------------------------------------------


def pieces() -> Counter[str]:
    """What is mapped of memory without a name, but for the backends' segments: how often each."""
    mapped: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, _, _, number, *name = line.split(maxsplit=5)
        if name and "memfd:phalanx" in name[0]:
            mapped[number] += 1
    return mapped


def files() -> int:
    """How many files of memory without a name this process has open."""
    links = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("memfd:phalanx" in os.readlink(link) for link in links)


def test_it_outlives_the_backends(sharing: Cluster) -> None:
    first, second = sharing.run(lambda backend: common(backend, 1000), 2)
    first.fill_(1)
    second[:500] += 1
    assert first.sum() == second.sum() == 1500


def test_a_closed_backend_gives_no_more(sharing: Cluster) -> None:
    def close(backend: Backend) -> None:
        memory = common(backend, 10)
        memory[5 * backend.rank :][:5] = 1
        backend.barrier()
        backend.close()
        with pytest.raises(MisuseError):
            backend.common(10)
        assert memory.sum() == 10

    sharing.run(close, 2)


def test_each_ranks_mapping_goes_with_its_last_view() -> None:
    def share(backend: Backend) -> None:
        backend.barrier()
        before, opened = pieces(), files()
        backend.barrier()
        memory = common(backend, 1 << 20)
        view = memory[1000:2000].view(10, 100).t()
        del memory
        backend.barrier()
        assert (pieces() - before).total() == 2
        assert files() == opened
        backend.barrier()
        if backend.rank == 0:
            del view
        backend.barrier()
        assert (pieces() - before).total() == 1
        backend.barrier()
        if backend.rank == 1:
            del view
        backend.barrier()
        assert pieces() == before

    SharedMemory().run(share, 2)


def test_nothing_is_left_of_a_hundred_of_them() -> None:
    def share(backend: Backend) -> None:
        before, opened = pieces(), files()
        backend.barrier()
        for number in range(100):
            memory = common(backend, 1 << 18)
            memory[backend.rank] = number
        del memory
        backend.barrier()
        assert pieces() == before
        assert files() == opened

    SharedMemory().run(share, 2)


def test_nothing_is_left_of_those_that_came_to_nothing() -> None:
    before, opened = pieces(), files()

    def disagree(backend: Backend) -> None:
        for odd in range(3):
            group = backend.subgroup(range(3))
            with pytest.raises(DesyncError):
                group.common(1000 + (group.rank == odd))
                group.barrier()
            backend.barrier()

    SharedMemory().run(disagree, 3)
    gc.collect()  # errors and their frames hold on to each other
    assert pieces() == before
    assert files() == opened


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
