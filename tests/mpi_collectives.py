"""MPI's own collectives and what is made of them: run by mpi_ranks.py, on the cluster "mpi"."""

from __future__ import annotations

import copy
import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from clusters import Cluster
from forms import sizes
from mpi_cluster import Mpi
from torch import Tensor

import phalanx
from phalanx import Backend, MpiBackend, ReduceOp
from phalanx.core.reduce_op import REDUCTIONS
from phalanx.core.steps import NativeCall
from phalanx.native.mpi_library import MpiLibrary

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
DTYPES += [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool]
LENGTHS = sizes((1, 35), (1, 2, 35))
# One of each kind in which cutting differs; the others are folded in tests/backends.
CUT = sizes([torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool], DTYPES)


def contributions(dtype: torch.dtype, size: int, length: int) -> list[Tensor]:
    """Small numbers, of which neither the order of a sum nor a dtype shows."""
    values = torch.arange(size * length).reshape(size, length) % 3 + 1
    return list((values > 1 if dtype is torch.bool else values.to(dtype)).unbind())


@pytest.mark.parametrize("op", list(ReduceOp), ids=str)
@pytest.mark.parametrize("stage", [50, 1 << 20], ids="pieces of {} bytes".format)
def test_a_large_reduction_is_the_same_however_it_is_cut_into_pieces(
    cluster: Cluster, op: ReduceOp, stage: int
) -> None:
    class InPieces(MpiBackend):
        _make_library = staticmethod(partial(MpiLibrary, stage=stage, least_chunk=1))

    assert isinstance(cluster, Mpi)
    in_pieces = copy.copy(cluster)  # of the same processes
    in_pieces.kind = InPieces

    def reduce(backend: Backend) -> None:
        rank, size = backend.rank, backend.world_size
        for dtype in CUT:
            for length in LENGTHS:
                parts = contributions(dtype, size, size * length)
                if dtype not in REDUCTIONS[op].dtypes:
                    continue
                expected = phalanx.all_reduce(parts[rank], backend, op, algorithm="direct")
                assert torch.equal(phalanx.all_reduce(parts[rank], backend, op), expected)
                mine = parts[rank].clone()
                assert torch.equal(phalanx.all_reduce_(mine, backend, op), expected)
                scattered = phalanx.reduce_scatter(parts[rank], backend, op)
                assert torch.equal(scattered, expected.view(size, -1)[rank])
                total = phalanx.reduce(parts[rank], backend, size - 1, op)
                assert (total is None) == (rank != size - 1)
                assert total is None or torch.equal(total, expected)

    for size in (2, 3):
        in_pieces.run(reduce, size)


def test_what_mpi_reduces_is_what_messages_would(cluster: Cluster) -> None:
    def reduce(backend: Backend) -> int:
        by_mpi = 0
        for dtype in [*DTYPES, torch.uint16, torch.uint32, torch.uint64]:
            for op in ReduceOp:
                mine = contributions(dtype, backend.world_size, 5)[backend.rank]
                native = backend.native
                assert native is not None
                if native.steps(NativeCall("all_reduce", mine, mine, op)):
                    by_mpi += 1
                    expected = phalanx.all_reduce(mine, backend, op, algorithm="direct")
                    assert torch.equal(phalanx.all_reduce(mine, backend, op), expected)
        return by_mpi

    assert set(cluster.run(reduce, 3)) == {72}


def test_the_least_of_numbers_and_nan_is_nan_however_small_the_tensor(cluster: Cluster) -> None:
    def reduce(backend: Backend) -> list[bool]:
        mine = torch.tensor([1.0, float("nan")] if backend.rank else [float("nan"), 1.0])
        least = phalanx.all_reduce(mine, backend, ReduceOp.MIN)
        return list(map(bool, least.isnan()))

    assert cluster.run(reduce, 2) == [[True, True]] * 2


def test_traffic_on_the_same_communicator_is_not_mixed_with(cluster: Cluster) -> None:
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD

    def talk(backend: Backend) -> None:
        other = 1 - backend.rank
        theirs = bytearray(3)
        sent = world.Isend([b"abc", MPI.BYTE], other, 0)
        coming = world.Irecv([theirs, MPI.BYTE], other, 0)
        into = torch.empty(3)
        backend.sendrecv(torch.full((3,), 1.0 + backend.rank), other, into, other)
        assert phalanx.all_reduce(into, backend).tolist() == [3.0] * 3
        while not (sent.Test() and coming.Test()):
            pass
        assert theirs == b"abc"

    cluster.run(talk, 2)


def test_groups_that_every_rank_makes_and_uses_in_another_order_all_complete(
    cluster: Cluster,
) -> None:
    def cross(backend: Backend) -> None:
        rank, size = backend.rank, backend.world_size
        everyone = [c for k in range(2, size + 1) for c in itertools.combinations(range(size), k)]
        mine = [members for members in everyone if rank in members]
        for number in range(sizes(4, 10)):
            random.Random(100 * number + rank).shuffle(mine)
            groups = {members: backend.subgroup(members) for members in mine}
            length = 20_000 if number % 2 else 3
            pending = {
                members: phalanx.async_all_reduce(torch.full((length,), 1.0 + rank), group)
                for members, group in groups.items()
            }
            for members in reversed(mine):
                assert pending[members].wait()[0] == sum(1 + member for member in members)
                groups[members].close()

    cluster.run(cross, 4)


def test_backends_come_and_go_while_others_still_close(cluster: Cluster) -> None:
    """What comes late for a communicator that is gone must not be taken for the next one's."""

    def come_and_go(backend: Backend) -> None:
        assert phalanx.all_reduce(torch.ones(2), backend).tolist() == [backend.world_size] * 2
        if backend.rank == 0:
            backend.close()

    for size in (4, 2, 3, 2) * sizes(2, 5):
        cluster.run(come_and_go, size)
