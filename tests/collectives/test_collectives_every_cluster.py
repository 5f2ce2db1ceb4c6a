"""Each collective of the table, once, whatever connects the ranks; the rest is tried elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clusters import Cluster
from forms import sizes
from torch import Tensor

import phalanx
from phalanx import Backend, DesyncError, DistributedError, ReduceOp

PROMPT = 15.0  # seconds after which a rank that was not told gives up, with an error that shows it
LARGE = 100_000  # elements: more than a block, and than a frame's worth of small ones
SIZES = sizes((1, 3), (1, 2, 4))

pytestmark = pytest.mark.usefixtures("asking_soon")


def ramp(rank: int, length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32) % 1000 + rank


@pytest.mark.checkered
@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree", "halving_doubling", "star"])
def test_reduce(cluster: Cluster, algorithm: str) -> None:
    def run(backend: Backend) -> None:
        p = backend.world_size
        for root in {0, p - 1}:
            for length in (3, LARGE):
                total = phalanx.reduce(
                    ramp(backend.rank, length), backend, root, algorithm=algorithm
                )
                assert (total is None) == (backend.rank != root)
                expected = p * ramp(0, length) + p * (p - 1) / 2
                assert total is None or torch.equal(total, expected)

    for size in SIZES:
        cluster.run(run, size)


@pytest.mark.checkered
@pytest.mark.parametrize("algorithm", ["tree", "star"])
def test_gather_and_scatter(cluster: Cluster, algorithm: str) -> None:
    def run(backend: Backend) -> None:
        p = backend.world_size
        for root in {0, p - 1}:
            for length in (1, LARGE):
                mine = ramp(backend.rank, length)
                joined = phalanx.gather(mine, backend, root, algorithm=algorithm)
                expected = torch.cat([ramp(rank, length) for rank in range(p)])
                assert (joined is None) == (backend.rank != root)
                assert joined is None or torch.equal(joined, expected)
                shown = expected if joined is None else joined
                part = phalanx.scatter(shown, backend, root, algorithm=algorithm)
                assert torch.equal(part, mine)

    for size in SIZES:
        cluster.run(run, size)


@pytest.mark.checkered
@pytest.mark.parametrize("algorithm", ["direct", "pairwise"])
def test_all_to_all(cluster: Cluster, algorithm: str) -> None:
    def run(backend: Backend) -> None:
        p, rank = backend.world_size, backend.rank
        for length in (1, LARGE):
            mine = torch.cat([ramp(10 * rank + peer, length) for peer in range(p)])
            expected = torch.cat([ramp(10 * peer + rank, length) for peer in range(p)])
            assert torch.equal(phalanx.all_to_all(mine, backend, algorithm=algorithm), expected)
            send = [length if peer <= rank else 0 for peer in range(p)]
            recv = [length if peer >= rank else 0 for peer in range(p)]
            rows = phalanx.all_to_all_uneven(
                mine[: (rank + 1) * length], backend, send, recv, algorithm=algorithm
            )
            assert torch.equal(rows, expected[rank * length :])

    for size in SIZES:
        cluster.run(run, size)


def test_all_reduce_coalesced(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        mine = [torch.ones(2, 2), torch.tensor(backend.rank), ramp(backend.rank, LARGE)]
        ones, ranks, long = phalanx.all_reduce_coalesced(mine, backend, ReduceOp.MAX)
        top = backend.world_size - 1
        assert torch.equal(ones, torch.ones(2, 2))
        assert ranks.item() == top
        assert torch.equal(long, ramp(top, LARGE))

    for size in SIZES:
        cluster.run(run, size)


def test_many_of_all_kinds_may_be_under_way_at_once(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        p, rank = backend.world_size, backend.rank
        mine = torch.arange(p * 2.0) + 100 * rank
        for _ in range(3):
            pending = [
                phalanx.async_reduce(mine, backend, 1),
                phalanx.async_gather(mine[:1], backend, 2),
                phalanx.async_scatter(mine, backend, 0),
                phalanx.async_all_to_all(mine, backend),
                phalanx.async_all_to_all_uneven(mine[:p], backend, [1] * p, [1] * p),
                phalanx.async_all_reduce_coalesced([mine, mine.long()], backend),
                phalanx.async_all_gather_object(rank, backend),
                phalanx.async_broadcast_object(rank, backend, 2),
            ]
            results = [each.wait() for each in reversed(pending)][::-1]  # type: ignore[attr-defined]
            total = sum(torch.arange(p * 2.0) + 100 * peer for peer in range(p))
            assert isinstance(total, Tensor)
            assert rank != 1 or torch.equal(results[0], total)
            assert rank != 2 or results[1].tolist() == [100.0 * peer for peer in range(p)]
            assert results[2].tolist() == [2.0 * rank, 2.0 * rank + 1]
            columns = [[100.0 * s + 2 * rank, 100.0 * s + 2 * rank + 1] for s in range(p)]
            assert results[3].view(p, 2).tolist() == columns
            assert results[4].tolist() == [100.0 * s + rank for s in range(p)]
            assert torch.equal(results[5][0], total)
            assert torch.equal(results[5][1], total.long())
            assert results[6] == list(range(p))
            assert results[7] == 2

    cluster.run(run, 3)


Call = Callable[[Backend], object]
ONES = torch.ones(6)

# What rank 1 does, and what all the others do; everyone has something to receive or to be told.
DISAGREEMENTS: dict[str, tuple[Call, Call]] = {
    "reduce: another reduction": (
        lambda b: phalanx.reduce(ONES, b, 0, ReduceOp.MAX, algorithm="ring"),
        lambda b: phalanx.reduce(ONES, b, 0, algorithm="ring"),
    ),
    "reduce: another shape": (
        lambda b: phalanx.reduce(torch.ones(2, 3), b, 0, algorithm="direct"),
        lambda b: phalanx.reduce(ONES, b, 0, algorithm="direct"),
    ),
    "gather: another dtype": (
        lambda b: phalanx.gather(ONES.int(), b, 0),
        lambda b: phalanx.gather(ONES, b, 0),
    ),
    "scatter: another shape is expected": (
        lambda b: phalanx.scatter(torch.ones(12), b, 0),
        lambda b: phalanx.scatter(ONES, b, 0),
    ),
    "gather: another root": (
        lambda b: phalanx.gather(ONES, b, 1),
        lambda b: phalanx.gather(ONES, b, 0),
    ),
    "scatter: another root": (
        lambda b: phalanx.scatter(ONES, b, 1),
        lambda b: phalanx.scatter(ONES, b, 0),
    ),
    "all_to_all: another shape": (
        lambda b: phalanx.all_to_all(torch.ones(6, 1), b),
        lambda b: phalanx.all_to_all(ONES, b),
    ),
    "all_to_all: of rows": (
        lambda b: phalanx.all_to_all_uneven(ONES[:3], b, [1, 1, 1], [1, 1, 1]),
        lambda b: phalanx.all_to_all(ONES, b),
    ),
    "all_reduce: of a list": (
        lambda b: phalanx.all_reduce_coalesced([ONES], b, algorithm="ring"),
        lambda b: phalanx.all_reduce(ONES, b, algorithm="ring"),
    ),
    "objects: one or all": (
        lambda b: phalanx.broadcast_object(1, b, 1),
        lambda b: phalanx.all_gather_object(1, b),
    ),
}


@pytest.mark.checkered
@pytest.mark.requires("agreement")
@pytest.mark.parametrize("disagreement", DISAGREEMENTS.values(), ids=DISAGREEMENTS.keys())
def test_ranks_that_disagree_are_told(cluster: Cluster, disagreement: tuple[Call, Call]) -> None:
    odd, usual = disagreement

    def run(backend: Backend) -> DistributedError:
        def call() -> None:
            (odd if backend.rank == 1 else usual)(backend)
            backend.barrier()  # who only sends learns at its next call

        with pytest.raises(DistributedError) as info:
            call()
        return info.value

    errors = cluster.run(run, 3, timeout=PROMPT)
    for error in errors:
        assert isinstance(error, DesyncError), errors
