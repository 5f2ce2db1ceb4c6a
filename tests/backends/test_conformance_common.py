"""Memory that ranks have in common, on every kind of backend that has any."""

from __future__ import annotations

import pytest
import torch
from clusters import Cluster, Hybrid, SharedMemory, Simulated, Tcp
from common_memory import common, having_memory

import phalanx
from phalanx import Backend

# What it is ---------------------------------------------------------------------------------


@pytest.mark.checkered
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


@pytest.mark.checkered
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


@pytest.mark.parametrize(
    ("ranks", "seen"), [(Simulated(), False), (Tcp(), False), (SharedMemory(), True)], ids=str
)
def test_a_backend_says_whether_others_see_memory_from_empty(ranks: Cluster, seen: bool) -> None:
    assert ranks.run(lambda backend: backend.registers_memory, 2) == [seen, seen]
