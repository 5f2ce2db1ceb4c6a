"""A mesh: a grid of ranks, and a backend for every line of it."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_runs import Watched, outcome_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx import (
    DDP,
    Backend,
    DesyncError,
    DeviceMesh,
    InvalidRankError,
    InvalidWorldSizeError,
    Pipeline,
    PipelineParallelConfig,
    SimulatedBackend,
    SubBackend,
    all_gather,
    all_reduce,
    parallelize,
    simulate,
)

PICTURES = {
    ((2, 4), ("data", "tensor")): """\
DeviceMesh(data=2, tensor=4), rank 5 at (1, 1)
      tensor
data  0   1   2   3
      4  [5]  6   7""",
    ((2, 2, 2), ("data", "stage", "tensor")): """\
DeviceMesh(data=2, stage=2, tensor=2), rank 5 at (1, 0, 1)
data=0  tensor
stage   0   1
        2   3
data=1  tensor
stage   4  [5]
        6   7""",
    ((6,), ("data",)): """\
DeviceMesh(data=6), rank 5 at (5,)
  data
  0   1   2   3   4  [5]""",
    ((12, 1), ("data", "x")): """\
DeviceMesh(data=12, x=1), rank 5 at (5, 0)
      x
data   0
       1
       2
       3
       4
     [ 5]
       6
       7
       8
       9
      10
      11""",
}


@pytest.mark.parametrize("case", PICTURES, ids=str)
def test_a_mesh_is_drawn(case: tuple[tuple[int, ...], tuple[str, ...]]):
    shape, names = case
    drawn = simulate(lambda backend: repr(DeviceMesh(backend, shape, names)), prod(shape))[5]
    squeezed = [line.replace("[ ", " [").rstrip() for line in PICTURES[case].splitlines()]
    assert drawn.splitlines() == squeezed


def test_a_large_mesh_is_not_drawn():
    drawn = simulate(lambda b: repr(DeviceMesh(b, (2, 35), ("data", "tensor"))), 70)[69]
    assert drawn == "DeviceMesh(data=2, tensor=35), rank 69 at (1, 34)"


@settings(max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: prod(s) <= 12))
def test_the_last_axis_varies_fastest_and_lines_are_the_ranks_along_them(shape: list[int]):
    names = [f"axis{number}" for number in range(len(shape))]
    places = list(product(*map(range, shape)))

    def run(backend: Backend) -> None:
        mesh = DeviceMesh(backend, shape, names)
        assert mesh.shape == tuple(shape)
        assert mesh.axis_names == tuple(names)
        assert mesh.coordinates == places[backend.rank]
        for rank, place in enumerate(places):
            assert mesh.rank_at(*place) == rank
            assert mesh.coordinates_of(rank) == place
        for axis, name in enumerate(names):
            line = mesh[name]
            assert isinstance(line, SubBackend)
            assert line is mesh[name]
            assert line.world_size == shape[axis]
            assert line.rank == mesh.coordinates[axis]
            for member in line.members:
                apart = [a != b for a, b in zip(places[member], mesh.coordinates, strict=True)]
                assert not any(differs for n, differs in enumerate(apart) if n != axis)

    simulate(run, prod(shape))


def test_every_line_is_a_group_of_its_own(cluster: Cluster):
    def run(backend: Backend) -> list[list[int]]:
        mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
        mine = torch.tensor([backend.rank])
        groups = (mesh["data"], mesh["tensor"], mesh["data", "tensor"], mesh[("tensor",)])
        return [all_gather(mine, group).tolist() for group in groups]

    everyone = [0, 1, 2, 3]
    assert cluster.run(run, 4) == [
        [[0, 2], [0, 1], everyone, [0, 1]],
        [[1, 3], [0, 1], everyone, [0, 1]],
        [[0, 2], [2, 3], everyone, [2, 3]],
        [[1, 3], [2, 3], everyone, [2, 3]],
    ]


def test_planes_are_flattened_in_the_order_of_ranks():
    def run(backend: Backend) -> tuple[tuple[int, ...], ...]:
        mesh = DeviceMesh(backend, (2, 2, 2), ("data", "stage", "tensor"))
        assert mesh["data", "tensor"] is mesh["data", "tensor"]
        return (
            mesh["data", "stage"].members,
            mesh["data", "tensor"].members,
            mesh["stage", "tensor"].members,
        )

    assert simulate(run, 8)[6] == ((0, 2, 4, 6), (2, 3, 6, 7), (4, 5, 6, 7))


def test_a_mesh_of_a_line_of_a_mesh():
    """Two axes that are one to whoever made the outer mesh."""

    def run(backend: Backend) -> tuple[int, ...]:
        outer = DeviceMesh(backend, (2, 4), ("data", "model"))
        inner = DeviceMesh(outer["model"], (2, 2), ("stage", "tensor"))
        mine = torch.tensor([backend.rank])
        return tuple(all_gather(mine, inner["stage"]).tolist())

    assert simulate(run, 8)[5] == (5, 7)


def test_lines_reduce_beside_each_other_in_any_order():
    def run(backend: Backend) -> list[float]:
        mesh = DeviceMesh(backend, (2, 3), ("data", "tensor"))
        names = ["data", "tensor"] if backend.rank % 2 else ["tensor", "data"]
        one = torch.tensor([10.0**backend.rank])
        from phalanx import async_all_reduce

        pending = {name: async_all_reduce(one, mesh[name]) for name in names}
        return [pending[name].wait().item() for name in ("data", "tensor")]

    for rank, (data, tensor) in enumerate(simulate(run, 6)):
        assert data == 10 ** (rank % 3) + 10 ** (rank % 3 + 3)
        assert tensor == (111 if rank < 3 else 111000)


def test_it_costs_one_message_of_8_bytes():
    def run(backend: Backend) -> list[str]:
        watched = Watched(backend)
        mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
        mesh["data", "tensor"]
        return [event.split()[0] for event in watched.events]

    assert simulate(run, 4)[0] == ["all_gather"]


# What is refused ----------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "too few": ((2, 2), ("a", "b"), InvalidWorldSizeError, "2 x 2 has 4 places, .* 6 ranks"),
    "too many": ((2, 4), ("a", "b"), InvalidWorldSizeError, "8 places"),
    "none": ((), (), InvalidWorldSizeError, "no axes"),
    "zero": ((0, 6), ("a", "b"), InvalidWorldSizeError, "1 or more"),
    "negative": ((-2, -3), ("a", "b"), InvalidWorldSizeError, "1 or more"),
    "no numbers": (("2", "3"), ("a", "b"), TypeError, "whole numbers"),
    "fractions": ((2.0, 3.0), ("a", "b"), TypeError, "whole numbers"),
    "one name twice": ((2, 3), ("a", "a"), ValueError, "one name: a, a"),
    "a name less": ((2, 3), ("a",), ValueError, "needs 2 names, .* given 1: a"),
    "no names": ((2, 3), (1, 2), ValueError, "words"),
    "a number for names": ((6,), 6, TypeError, "a list of words, not 6"),
    "an empty name": ((2, 3), ("a", ""), ValueError, "words"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_grid_that_cannot_be_is_refused_before_anything_is_sent(case: str):
    shape, names, kind, message = WRONG[case]
    backend = SimulatedBackend.create_group(6, timeout=1.0)[0]
    with pytest.raises(kind, match=message):
        DeviceMesh(backend, shape, names)


@pytest.mark.parametrize("what", ["shape", "names"])
def test_ranks_that_make_different_meshes_are_told_so(what: str):
    def run(backend: Backend) -> BaseException | None:
        shape = (3, 2) if what == "shape" and backend.rank == 4 else (2, 3)
        names = ("b", "a") if what == "names" and backend.rank == 4 else ("a", "b")
        return outcome_of(lambda: DeviceMesh(backend, shape, names))

    expected = {
        "shape": "rank 4 has the shape (3, 2), rank 0 has the shape (2, 3)",
        "names": "rank 4 has the axes ('b', 'a'), rank 0 has the axes ('a', 'b')",
    }
    for error in simulate(run, 6):
        assert isinstance(error, DesyncError)
        assert expected[what] in str(error)


@pytest.mark.parametrize("axes", ["model", (), ("tensor", "data"), ("data", "data"), 0, (0,)])
def test_axes_that_are_not_there_or_in_another_order_are_refused(axes: Any):
    def run(backend: Backend) -> None:
        mesh = DeviceMesh(backend, (1, 2), ("data", "tensor"))
        with pytest.raises(KeyError, match="this mesh has the axes data, tensor"):
            mesh[axes]

    simulate(run, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh: parallelize(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": "column"}),
        lambda mesh: Pipeline([nn.Tanh(), nn.Tanh()], mesh, PipelineParallelConfig(2, 2)),
        lambda mesh: DDP(nn.Linear(2, 2), mesh),
        lambda mesh: all_reduce(torch.ones(1), mesh),
    ],
    ids=["parallelize", "Pipeline", "DDP", "all_reduce"],
)
def test_a_mesh_given_for_a_backend_says_what_to_give(use: Any):
    def run(backend: Backend) -> None:
        mesh = DeviceMesh(backend, (2,), ("tensor",))
        with pytest.raises(AttributeError, match=r"It is no backend: .* such as mesh\['tensor'\]"):
            use(mesh)
        assert not hasattr(mesh, "rank")

    simulate(run, 2)


def test_places_that_are_not_there_are_refused():
    def run(backend: Backend) -> None:
        mesh = DeviceMesh(backend, (1, 2), ("data", "tensor"))
        for place in ((1, 0), (0, -1), (0,), (0, 0, 0)):
            with pytest.raises(InvalidRankError, match="has no place"):
                mesh.rank_at(*place)
        with pytest.raises(InvalidRankError):
            mesh.coordinates_of(2)

    simulate(run, 2)


def test_axes_of_one_rank_are_groups_of_one_rank():
    def run(backend: Backend) -> None:
        mesh = DeviceMesh(backend, (1, 2, 1), ("data", "stage", "tensor"))
        assert all_reduce(torch.ones(1), mesh["data"]).item() == 1
        assert all_reduce(torch.ones(1), mesh["stage"]).item() == 2
        assert mesh["tensor"].world_size == 1

    simulate(run, 2)
