"""Kept versions: what a lost rank has written is given by its host, or by a rank of another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx import FSDP, Backend, ErrorFeedback, TopK
from phalanx.elastic.moves import Holding, holding
from phalanx.elastic.versions import KeptPart, VersionFile, Versions, part_of

SIZE, HOSTS = 4, (0, 0, 0, 1)
MEMBERS = [f"p{rank}" for rank in range(SIZE)]


def part(backend: Backend, value: float = 1.0, *, residuals: bool = False) -> KeptPart:
    torch.manual_seed(0)
    compression = ErrorFeedback(TopK(0.5)) if residuals else None
    model = FSDP(nn.Linear(40, 5), backend, compression=compression)
    if residuals:
        model(torch.randn(3, 40)).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return part_of(holding(backend.rank, model, values={"value": value}), SIZE, ())


def on_all(fn: Callable[[Backend, Versions], Any], hosts: tuple[int, ...] = HOSTS) -> list[Any]:
    def run(backend: Backend) -> Any:
        backend.topology = hosts
        versions = Versions(1, backend, MEMBERS, lambda: None)
        result = fn(backend, versions)
        phalanx.barrier(backend)
        versions.close()
        return result

    return list(phalanx.simulate(run, SIZE))


def elements(given: list[Holding]) -> dict[int, float]:
    """Return the sum of each given rank's elements."""
    return {
        each.rank: sum(float(t.sum()) for tensors in each.tensors for t in tensors.values())
        for each in given
    }


@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), HOSTS, (0, 0, 1, 1), (0, 1, 2, 3)])
def test_each_part_is_given_while_its_host_or_the_next_one_lives(
    hosts: tuple[int, ...],
) -> None:
    def give(backend: Backend, versions: Versions) -> list[dict[int, float]]:
        versions.write(7, part(backend, backend.rank + 1.0))
        phalanx.barrier(backend)
        return [elements(versions.give(7, living)) for living in subsets]

    subsets = [list(each) for n in range(1, SIZE + 1) for each in combinations(MEMBERS, n)]
    for living, *given in zip(subsets, *on_all(give, hosts), strict=True):
        by_living = [each for rank, each in enumerate(given) if MEMBERS[rank] in living]
        found = {rank: total for each in by_living for rank, total in each.items()}
        homes = {hosts[MEMBERS.index(each)] for each in living}
        kept = [rank for rank in range(SIZE) if homes & {hosts[rank], next_host(rank, hosts)}]
        assert sorted(found) == kept, (living, given)
        givers = {
            rank: [rank in each for each in given] for rank in kept if MEMBERS[rank] in living
        }
        assert all(of == [each == rank for each in range(SIZE)] for rank, of in givers.items())
        if len(kept) == SIZE:
            assert sum(total / (rank + 1) for rank, total in found.items()) == 40 * 5 + 5


def test_a_file_that_has_taken_the_place_of_another_one_is_not_opened() -> None:
    told, here = VersionFile.create(), os.getpid()
    fd, inode = told.fd, told.inode()
    VersionFile.open_of(here, fd, inode).close()
    told.close()
    other = VersionFile.create()
    assert other.fd == fd
    with pytest.raises(FileNotFoundError, match="another file"):
        VersionFile.open_of(here, fd, inode)
    other.close()


def next_host(rank: int, hosts: tuple[int, ...]) -> int:
    """Return the host of the next rank that is on another one; without one its own."""
    after = [hosts[(rank + distance) % SIZE] for distance in range(1, SIZE)]
    return next((host for host in after if host != hosts[rank]), hosts[rank])


def test_the_two_last_versions_are_held_with_their_values() -> None:
    def held(backend: Backend, versions: Versions) -> Any:
        for version in range(5):
            versions.write(version, part(backend, float(version)))
        phalanx.barrier(backend)
        own = [versions.give(version, MEMBERS) for version in range(5)]
        return sorted({each.version for each in versions.held()}), [
            each[0].parts[0].extra if each else None for each in own
        ]

    for versions, values in on_all(held):
        assert versions == [3, 4]
        assert values == [None, None, None, {"value": 3.0}, {"value": 4.0}]


def test_a_version_that_is_being_written_is_held_by_nobody() -> None:
    def held(backend: Backend, versions: Versions) -> list[int]:
        versions.write(0, part(backend))

        def pause() -> None:
            seen.append(sorted(each.version for each in versions.held() if each.part == 0))

        seen: list[list[int]] = []
        if backend.rank == 0:
            versions._pause = pause
        for version in (1, 2):
            versions.write(version, part(backend))
        return seen  # type: ignore[return-value]

    seen = on_all(held, (0, 0, 0, 0))[0]
    assert set(map(tuple, seen)) == {(0,), (1,)}


def test_residuals_stay_on_their_host() -> None:
    def kinds(backend: Backend, versions: Versions) -> dict[int, set[str]]:
        versions.write(1, part(backend, residuals=True))
        phalanx.barrier(backend)
        given = versions.give(1, MEMBERS[3:])
        return {
            each.rank: {name for shard in each.tensors[0] for name in shard.name.split("/")[:1]}
            for each in given
        }

    of_own, of_guests = {"weight", "bias", "own"}, {"weight", "bias"}
    assert on_all(kinds)[3] == {0: of_guests, 1: of_guests, 2: of_guests, 3: of_own}


def test_a_larger_version_takes_more_room_and_a_reader_keeps_what_it_has_read() -> None:
    file = VersionFile.create()
    small, large = (part_of_plain(size) for size in (10, 100_000))
    file.write((1, 1), small, lambda: None)
    read = file.read()
    file.write((2, 1), large, lambda: None)
    assert file.version() == (2, 1)
    assert elements([file.read()]) == {0: 100_000 * 2.0}
    assert sum(t.numel() for t in read.tensors[0].values()) == 10
    file.close()


def part_of_plain(size: int) -> KeptPart:
    model = nn.ParameterDict({"w": nn.Parameter(torch.full((size,), 2.0))})
    return part_of(holding(0, model), 1, ())
