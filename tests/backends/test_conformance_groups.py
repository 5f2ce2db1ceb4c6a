"""Subgroups, on every kind of backend: of it, and of subgroups of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import (
    Backend,
    InvalidRankError,
    InvalidWorldSizeError,
    SelfSendError,
    SimulatedBackend,
    SubBackend,
    simulate,
)


def test_members_are_sorted_without_repeats_and_numbered_in_order(cluster: Cluster) -> None:
    def make(backend: Backend) -> None:
        if backend.rank not in (1, 3, 4):
            return
        group = backend.subgroup([4, 1, 3, 1, 4])
        assert isinstance(group, SubBackend)
        assert list(group.members) == [1, 3, 4]
        assert (group.rank, group.world_size) == ({1: 0, 3: 1, 4: 2}[backend.rank], 3)
        assert group.parent is backend
        assert group.timeout == backend.timeout
        assert [group.to_global(local) for local in range(3)] == [1, 3, 4]
        assert [group.to_local(rank) for rank in range(6)] == [None, 0, None, 1, 2, None]
        assert group.to_local(-1) is None
        assert group.to_global(group.rank) == backend.rank
        for wrong in (3, -1):
            with pytest.raises(InvalidRankError):
                group.to_global(wrong)
        assert len(group.topology) == 3

    cluster.run(make, 5)


@pytest.mark.checkered
@pytest.mark.parametrize("kind", [list, tuple, set, iter, dict.fromkeys])
def test_members_may_come_in_any_collection(cluster: Cluster, kind: type) -> None:
    def make(backend: Backend) -> list[int]:
        return list(backend.subgroup(kind([1, 0])).members)

    assert cluster.run(make, 2) == [[0, 1], [0, 1]]


@pytest.mark.checkered
@pytest.mark.parametrize("members", [[0, 2], [0, -1], [0, 1, 10**9]])
def test_a_member_that_does_not_exist_is_refused(cluster: Cluster, members: list[int]) -> None:
    def make(backend: Backend) -> None:
        with pytest.raises(InvalidRankError, match="is not one of the 2 ranks 0 to 1"):
            backend.subgroup(members)
        assert phalanx.all_reduce(torch.ones(1), backend.subgroup([0, 1])).item() == 2

    cluster.run(make, 2)


@pytest.mark.parametrize("members", [3, None])
def test_members_are_a_list(members: Any) -> None:
    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(TypeError, match=f"rank 0: members is a list of ranks, not {members}"):
        backend.subgroup(members)


@pytest.mark.parametrize("members", ["01", [0, "1"], [0.0, 1]])
def test_a_member_is_a_whole_number(members: Any) -> None:
    def make(backend: Backend) -> None:
        with pytest.raises(InvalidRankError, match=r"member .* is not one of the 2 ranks 0 to 1"):
            backend.subgroup(members)

    simulate(make, 2)


def test_a_group_of_nobody_is_refused(cluster: Cluster) -> None:
    def make(backend: Backend) -> None:
        with pytest.raises(InvalidWorldSizeError, match="at least one member"):
            backend.subgroup([])

    cluster.run(make, 2)


def test_a_group_that_the_caller_is_not_in_is_refused_and_leaves_no_trace(cluster: Cluster) -> None:
    def make(backend: Backend) -> float:
        if backend.rank == 2:
            with pytest.raises(InvalidRankError, match=r"ranks \[0, 1\].*only members") as info:
                backend.subgroup([0, 1])
            assert info.value.rank == 2
            backend.barrier()
            return 0
        group = backend.subgroup([0, 1])
        backend.barrier()
        return phalanx.all_reduce(torch.ones(1), group).item()

    assert cluster.run(make, 3) == [2, 2, 0]


def test_peers_and_errors_are_numbered_as_in_the_group(cluster: Cluster) -> None:
    def make(backend: Backend) -> None:
        if backend.rank == 0:
            return
        group = backend.subgroup([1, 2])
        with pytest.raises(SelfSendError) as info:
            group.send(b"x", group.rank)
        assert (info.value.rank, info.value.peer) == (group.rank, group.rank)
        with pytest.raises(InvalidRankError, match="2 is not one of the 2 ranks 0 to 1"):
            group.send(b"x", 2)
        into = bytearray(1)
        group.sendrecv(bytes([group.rank]), 1 - group.rank, into, 1 - group.rank)
        assert into[0] == 1 - group.rank
        root = phalanx.broadcast(torch.tensor(backend.rank), group, root=1)
        assert int(root) == 2

    cluster.run(make, 3)


def test_a_group_of_one_gives_values_back_and_needs_nobody(cluster: Cluster) -> None:
    def alone(backend: Backend) -> None:
        group = backend.subgroup([backend.rank])
        assert (group.rank, group.world_size) == (0, 1)
        value = torch.arange(3.0)
        group.barrier()
        assert phalanx.all_reduce(value, group, phalanx.ReduceOp.MEAN).tolist() == [0, 1, 2]
        assert phalanx.all_gather(value, group).tolist() == [0, 1, 2]
        assert phalanx.reduce_scatter(value, group).tolist() == [0, 1, 2]
        assert phalanx.broadcast(value, group).tolist() == [0, 1, 2]

    cluster.run(alone, 2)


@pytest.mark.wide
def test_groups_of_the_same_members_are_different_groups(cluster: Cluster) -> None:
    """The same numbers and tags in each, issued in another order on each rank."""

    def make(backend: Backend) -> None:
        groups = [backend.subgroup([0, 1]) for _ in range(3)]
        other = 1 - backend.rank
        order = [0, 1, 2] if backend.rank == 0 else [2, 0, 1]
        for number in order:
            groups[number].send(bytes([number]), other)
        pending = {n: phalanx.async_all_reduce(torch.tensor(n), groups[n]) for n in order}
        backend.send(b"\x63", other)
        for number, group in enumerate(groups):
            into = bytearray(1)
            group.recv(into, other)
            assert into[0] == number
            assert int(pending[number].wait()) == 2 * number
        into = bytearray(1)
        backend.recv(into, other)
        assert into == b"\x63"

    cluster.run(make, 2)


def test_making_a_group_does_not_wait_for_its_other_members(cluster: Cluster) -> None:
    def make(backend: Backend) -> float:
        if backend.rank == 0:
            group = backend.subgroup([0, 1])
            group.send(b"early", 1)
            backend.send(b"go", 1)
        else:
            backend.recv(bytearray(2), 0)
            group = backend.subgroup([0, 1])
            into = bytearray(5)
            group.recv(into, 0)
            assert into == b"early"
        return phalanx.all_reduce(torch.ones(1), group).item()

    assert cluster.run(make, 2) == [2.0, 2.0]


def test_closing_a_group_leaves_its_parent_and_its_siblings_open(cluster: Cluster) -> None:
    def make(backend: Backend) -> None:
        first, second = backend.subgroup([0, 1]), backend.subgroup([0, 1])
        phalanx.all_reduce(torch.ones(1), first)
        with first:
            pass
        with pytest.raises(phalanx.MisuseError, match="closed"):
            first.barrier()
        assert phalanx.all_reduce(torch.ones(1), second).item() == 2
        assert phalanx.all_reduce(torch.ones(1), backend).item() == 2

    cluster.run(make, 2)


@pytest.mark.checkered
@pytest.mark.wide
@pytest.mark.parametrize("end", ["close", "abort"])
def test_whoever_waits_in_a_group_for_a_rank_that_ends_it_is_told(
    cluster: Cluster, end: str
) -> None:
    """`Backend.close`: "peers that wait for this rank are told so"; a group is a backend, too."""

    def leave(backend: Backend) -> None:
        group = backend.subgroup([0, 1, 2])
        phalanx.all_reduce(torch.ones(1), group)
        backend.barrier()
        if backend.rank == 1:
            getattr(group, end)()
        else:
            with pytest.raises(phalanx.PeerLostError) as info:
                group.barrier(timeout=15)
            assert (info.value.rank, info.value.peer) == (group.rank, 1)
        assert phalanx.all_reduce(torch.ones(1), backend).item() == 3

    cluster.run(leave, 3)


@pytest.mark.wide
def test_a_grid_of_rows_and_columns(cluster: Cluster) -> None:
    """The groups of a mesh: 2 x 2 ranks; sums of rows, of columns, and of sums of rows."""

    def grid(backend: Backend) -> tuple[float, float, float]:
        row, column = divmod(backend.rank, 2)
        rows = backend.subgroup([2 * row, 2 * row + 1])
        columns = backend.subgroup([column, 2 + column])
        mine = torch.tensor([float(10**backend.rank)])
        in_row, in_column = phalanx.all_reduce(mine, rows), phalanx.all_reduce(mine, columns)
        return in_row.item(), in_column.item(), phalanx.all_reduce(in_row, columns).item()

    assert cluster.run(grid, 4) == [
        (11, 101, 1111),
        (11, 1010, 1111),
        (1100, 101, 1111),
        (1100, 1010, 1111),
    ]


@pytest.mark.wide
@pytest.mark.requires("mismatches")
def test_of_groups_that_are_bound_the_failure_of_one_breaks_the_other(cluster: Cluster) -> None:
    """In a row of the grid ranks disagree; the other row waits for them in columns."""

    def grid(backend: Backend) -> str:
        row, column = divmod(backend.rank, 2)
        rows = backend.subgroup([2 * row, 2 * row + 1])
        columns = backend.subgroup([column, 2 + column])
        rows.bind(columns)
        assert phalanx.all_reduce(torch.ones(1), rows).item() == 2
        backend.barrier()
        if row == 0:
            with pytest.raises(phalanx.DesyncError):
                phalanx.all_reduce(torch.ones(1 + column), rows)
        with pytest.raises(phalanx.DesyncError) as info:
            phalanx.all_reduce(torch.ones(1), columns)
        assert phalanx.all_reduce(torch.ones(1), backend).item() == 4
        return str(info.value)

    for text in cluster.run(grid, 4):
        assert "all_reduce #1 (float32 [1]" in text


def test_whole_numbers_of_other_libraries_are_ranks_too(cluster: Cluster) -> None:
    """`range` over a NumPy array, or `tensor.tolist()`: people do compute ranks."""

    def exchange(backend: Backend) -> float:
        group = backend.subgroup(np.arange(2))
        other = np.int64(1 - backend.rank)
        into = bytearray(1)
        group.sendrecv(b"x", other, into, other)  # type: ignore[arg-type]
        return phalanx.broadcast(torch.ones(1), group, root=np.int32(1)).item()  # type: ignore[arg-type]

    assert cluster.run(exchange, 2) == [1.0, 1.0]


def test_the_text_of_a_backend_tells_which_rank_it_is(cluster: Cluster) -> None:
    def show(backend: Backend) -> str:
        return repr(backend)

    for rank, text in enumerate(cluster.run(show, 2)):
        assert text.endswith(f"Backend(rank={rank}, world_size=2)")
