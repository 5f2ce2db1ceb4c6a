"""Many things at a time, on every kind of backend: nothing mixes, nothing waits for its order."""

from __future__ import annotations

import itertools

import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import Backend, ReduceOp
from phalanx.collectives.schedules import COLLECTIVES


def test_overlapping_groups_complete_in_opposite_orders(cluster: Cluster) -> None:
    """Rank 0 issues A then B, rank 1 issues B then A, and every other pair likewise."""

    def cross(backend: Backend) -> None:
        pairs = [pair for pair in itertools.combinations(range(4), 2) if backend.rank in pair]
        groups = {pair: backend.subgroup(pair) for pair in pairs}
        if backend.rank % 2:
            pairs.reverse()
        mine = torch.full((1000,), float(10**backend.rank))
        pending = [(pair, phalanx.async_all_reduce(mine, groups[pair])) for pair in pairs]
        for pair, each in sorted(pending) if backend.rank < 2 else pending[::-1]:
            assert (each.wait() == sum(10.0**rank for rank in pair)).all()

    cluster.run(cross, 4)


def test_blocking_calls_of_a_group_pass_by_what_is_outstanding_in_another(cluster: Cluster) -> None:
    """Rank 0: A, then B to the end, then A. Rank 1: B first."""

    def cross(backend: Backend) -> None:
        first, second = backend.subgroup([0, 1]), backend.subgroup([0, 1])
        if backend.rank == 0:
            pending = phalanx.async_all_reduce(torch.ones(5), first)
            assert phalanx.all_reduce(torch.ones(3), second).tolist() == [2.0] * 3
            assert pending.wait().tolist() == [2.0] * 5
        else:
            assert phalanx.all_reduce(torch.ones(3), second).tolist() == [2.0] * 3
            assert phalanx.all_reduce(torch.ones(5), first).tolist() == [2.0] * 5

    cluster.run(cross, 2)


def test_a_parent_and_its_subgroups_interleave(cluster: Cluster) -> None:
    def interleave(backend: Backend) -> None:
        inner = backend.subgroup([0, 1, 2])
        inmost = inner.subgroup([0, 2]) if backend.rank != 1 else None
        for number in range(6):
            pending = [phalanx.async_all_reduce(torch.tensor(number), backend)]
            if inmost is not None and backend.rank == 0:
                pending.insert(0, phalanx.async_all_reduce(torch.tensor(number), inmost))
            pending.append(phalanx.async_all_reduce(torch.tensor(number), inner))
            if inmost is not None and backend.rank == 2:
                pending.append(phalanx.async_all_reduce(torch.tensor(number), inmost))
            totals = sorted(int(each.wait()) for each in reversed(pending))
            assert totals == sorted([3 * number, 3 * number] + [2 * number] * (inmost is not None))

    cluster.run(interleave, 3)


def test_messages_pass_between_the_rounds_of_a_collective(cluster: Cluster) -> None:
    """A message between two ranks arrives while a collective is stuck for want of a third."""

    def pass_by(backend: Backend) -> None:
        into = bytearray(1)
        if backend.rank == 2:
            backend.recv(into, 0)
            assert phalanx.all_reduce(torch.ones(100), backend, algorithm="ring").sum() == 300
            return
        pending = phalanx.async_all_reduce(torch.ones(100), backend, algorithm="ring")
        other = 1 - backend.rank
        for tag in range(3):
            backend.sendrecv(bytes([tag]), other, into, other, tag=tag)
            assert into[0] == tag
        if backend.rank == 0:
            assert not pending.done()
            backend.send(b"!", 2)
        assert pending.wait().sum() == 300

    cluster.run(pass_by, 3)


def test_any_number_may_be_outstanding_and_waited_for_in_any_order(cluster: Cluster) -> None:
    def many(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        pending: list[tuple[torch.Tensor, phalanx.PendingCollective[torch.Tensor]]] = []
        for n in range(40):
            mine = torch.arange(size * (n + 1)) + 100 * rank + n
            everyone = torch.stack([mine + 100 * (r - rank) for r in range(size)])
            pending += [
                (everyone.sum(0), phalanx.async_all_reduce(mine, backend)),
                (everyone.flatten(), phalanx.async_all_gather(mine, backend)),
                (everyone[n % size], phalanx.async_broadcast(mine, backend, root=n % size)),
                (
                    everyone.amax(0).chunk(size)[rank],
                    phalanx.async_reduce_scatter(mine, backend, ReduceOp.MAX),
                ),
            ]
        order = torch.randperm(len(pending), generator=torch.Generator().manual_seed(rank)).tolist()
        for place in order:
            expected, each = pending[place]
            assert torch.equal(each.wait(), expected)
        assert all(each.done() for _, each in pending)

    cluster.run(many, 3)


def test_waiting_twice_gives_the_same_tensor_twice(cluster: Cluster) -> None:
    def twice(backend: Backend) -> None:
        into, mine = torch.empty(2), torch.ones(2)
        pending = phalanx.async_all_reduce(torch.ones(3), backend)
        written = phalanx.async_all_reduce(mine, backend, into=into)
        inplace = phalanx.async_all_reduce_(mine := torch.ones(2), backend)
        assert pending.op_name == "all_reduce"
        assert pending.wait() is pending.wait(timeout=0.5)
        assert written.wait() is into
        assert inplace.wait() is mine
        mine.zero_()
        assert inplace.wait().tolist() == [0, 0], "a second wait does not write again"

    cluster.run(twice, 2)


def test_done_becomes_true_without_anybody_waiting(cluster: Cluster) -> None:
    def poll(backend: Backend) -> int:
        pending = phalanx.async_all_reduce(torch.ones(2000), backend)
        while not pending.done():
            pass
        return int(pending.wait()[0])

    assert cluster.run(poll, 3) == [3, 3, 3]


def test_async_work_goes_on_while_its_rank_is_in_other_calls(cluster: Cluster) -> None:
    def overlap(backend: Backend) -> None:
        pending = phalanx.async_all_reduce(torch.ones(1 << 18), backend, algorithm="ring")
        backend.barrier()  # queued behind it
        assert pending.done()
        assert (pending.wait() == 3).all()

    cluster.run(overlap, 3)


def test_nobody_has_to_wait_for_an_async_collective(cluster: Cluster) -> None:
    def forget(backend: Backend) -> float:
        for _ in range(3):
            phalanx.async_all_reduce(torch.ones(3), backend)
        return phalanx.all_reduce(torch.ones(1), backend).item()

    assert cluster.run(forget, 3) == [3.0] * 3


@pytest.mark.checkered
@pytest.mark.parametrize("algorithm", COLLECTIVES["all_reduce"])
def test_the_bits_are_those_of_a_simulated_run(cluster: Cluster, algorithm: str) -> None:
    """Sizes that need several frames and blocks; rounding makes every other order visible."""
    count = (1 << 18) + 7

    def reduce(backend: Backend) -> torch.Tensor:
        generator = torch.Generator().manual_seed(backend.rank)
        mine = torch.randn(count, generator=generator)
        return phalanx.all_reduce(mine, backend, ReduceOp.MEAN, algorithm=algorithm)

    def reduce_on_such_hosts(backend: Backend) -> torch.Tensor:
        backend.topology = hosts  # by which two_level goes
        return reduce(backend)

    hosts = cluster.run(lambda backend: backend.topology, 3)[0]
    expected = phalanx.simulate(reduce_on_such_hosts, 3)[0]
    for result in cluster.run(reduce, 3):
        assert torch.equal(result, expected)
