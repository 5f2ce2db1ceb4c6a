"""`PHALANX_TUNING`: `auto` goes by what was measured, and all ranks by the same file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import (
    Backend,
    DesyncError,
    GlooBackend,
    HybridBackend,
    MisuseError,
    SharedMemoryBackend,
    SimulatedBackend,
    TcpBackend,
)
from phalanx.collectives.cost import choose
from phalanx.collectives.resolve import Resolved
from phalanx.collectives.tuning import FORMAT, VARIABLE, measured

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file with one table, in which some things are different."""

    def written(name: str = "tuning.json", **changes: Any) -> Path:
        table = {
            "backend": "SimulatedBackend",
            "hosts": [0, 0, 0],
            "collective": "all_reduce",
            "sizes": [16, 256, 4096],
            "seconds": {"star": [1e-6, 4e-6, 9e-6], "ring": [4e-6, 4.1e-6, 5e-6]},
        }
        path = tmp_path / name
        whole = {"format": FORMAT, "tables": [table | changes]}
        path.write_text(json.dumps(whole))
        return path

    return written


def a_rank(size: int = 3) -> Backend:
    return SimulatedBackend.create_group(size)[0]


def test_auto_picks_what_was_measured_to_be_best(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(write()))
    rank = a_rank()
    picked = {count: choose("all_reduce", count, rank).algorithm for count in (4, 16, 256, 4096)}
    assert picked == {4: "star", 16: "star", 256: "star", 4096: "ring"}
    assert "measured" in str(choose("all_reduce", 16, rank))


def test_between_sizes_times_are_interpolated_and_beyond_them_they_grow_with_the_bytes(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(write()))
    rank = a_rank()

    def star(count: int) -> float:
        known = measured("all_reduce", count, rank)
        assert known is not None
        return known[0]["star"]

    assert star(64) == pytest.approx(2e-6)  # half way from 16 to 256, and from 1 us to 4 us
    assert star(1) == star(16) == 1e-6
    assert star(0) == 1e-6
    assert star(40960) == pytest.approx(90e-6)


def test_other_backends_hosts_sizes_and_collectives_go_by_estimates(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {
        (name, size): choose(name, 64, a_rank(size))
        for name, size in (("all_gather", 3), ("all_reduce", 4))
    }
    monkeypatch.setenv(VARIABLE, str(write()))
    for (name, size), choice in without.items():
        assert choose(name, 64, a_rank(size)) == choice
    monkeypatch.setenv(VARIABLE, str(write(backend="TcpBackend")))
    assert measured("all_reduce", 64, a_rank()) is None


def test_a_group_goes_by_its_own_size_and_its_parents_kind(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(write()))
    group = a_rank(5).subgroup([0, 2, 4])
    assert choose("all_reduce", 16, group).tuning != ""


def test_hosts_are_compared_by_who_shares_one(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(write(hosts=[7, 7, 2])))
    rank = a_rank()
    assert measured("all_reduce", 16, rank) is None
    rank.topology = (0, 0, 1)
    rank.cache.clear()
    assert measured("all_reduce", 16, rank) is not None


def test_results_are_the_same_with_a_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(write()))

    def rank(backend: Backend) -> tuple[torch.Tensor, list[Any]]:
        mine = torch.full((100,), float(backend.rank + 1))
        return phalanx.all_reduce(mine, backend), phalanx.all_gather_object(backend.rank, backend)

    for summed, objects in phalanx.simulate(rank, 3):
        assert torch.equal(summed, torch.full((100,), 6.0))
        assert objects == [0, 1, 2]


def test_every_backend_goes_by_what_was_measured_on_its_kind(
    cluster: Cluster, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory, too, which has a way of its own where nothing was measured."""
    kinds = (SimulatedBackend, TcpBackend, SharedMemoryBackend, HybridBackend, GlooBackend)
    places = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2))
    seconds = {"ring": [1e-6] * 3, "star": [1e-3] * 3}
    whole = json.loads(write(seconds=seconds).read_text())
    whole["tables"] = [
        whole["tables"][0] | {"backend": kind.__name__, "hosts": hosts}
        for kind in kinds
        for hosts in places
    ]
    path = write("all.json")
    path.write_text(json.dumps(whole))
    monkeypatch.setenv(VARIABLE, str(path))

    def rank(backend: Backend) -> tuple[list[str], torch.Tensor]:
        mine = torch.full((100,), float(backend.rank + 1))
        total = phalanx.all_reduce(mine, backend)
        made = [made for made in backend.cache.values() if isinstance(made, Resolved)]
        return [choice.plan.key.algorithm for choice in made], total

    for algorithms, total in cluster.run(rank, 3):
        assert algorithms == ["ring"]
        assert torch.equal(total, torch.full((100,), 6.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: phalanx.all_reduce(torch.ones(4), backend),
        lambda backend: phalanx.all_gather_object(backend.rank, backend),
        lambda backend: phalanx.broadcast_object(backend.rank, backend),
    ],
    ids=["tensor", "objects", "an object"],
)
def test_ranks_with_different_files_are_told_so(
    call: Callable[[Backend], object], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same algorithm would be picked for now: the next size might be another matter."""
    files = [write(f"{rank}.json", sizes=[16, 256, 4096 + rank // 2]) for rank in range(3)]

    def rank(backend: Backend) -> None:
        monkeypatch.setenv(VARIABLE, str(files[backend.rank]))
        call(backend)  # which reads the file before it waits

    with pytest.raises(DesyncError, match=r"tuning \w{8}(.|\n)*tuning \w{8}"):
        phalanx.simulate(rank, 3)


def test_a_file_on_some_ranks_only_is_a_disagreement(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write())

    def rank(backend: Backend) -> None:
        monkeypatch.setenv(VARIABLE, path if backend.rank else "")
        phalanx.all_reduce(torch.ones(4), backend)

    with pytest.raises(DesyncError, match="tuning"):
        phalanx.simulate(rank, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": [16, 256]}, "one positive time for each size"),
        ({"sizes": [256, 16, 4096]}, "not positive and ascending"),
        ({"sizes": [], "seconds": {"ring": []}}, "not positive and ascending"),
        ({"seconds": {"ring": [1.0, 0.0, 1.0]}}, "one positive time"),
        ({"seconds": {"rang": [1.0, 1.0, 1.0]}}, "there is no algorithm 'rang'"),
        ({"seconds": {}}, "no algorithm"),
        ({"collective": "all_redcue"}, "there is no algorithm"),
        ({"seconds": 3}, "Expected `object`"),
    ],
)
def test_a_file_that_makes_no_sense_says_what_is_wrong(
    changes: dict[str, Any], words: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(**changes)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(MisuseError, match=words) as raised:
        phalanx.all_reduce(torch.ones(4), a_rank())
    assert str(path) in str(raised.value)
    assert "phalanx bench --tune" in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b'{"format": "of tomorrow", "tables": []}']
)
def test_a_file_of_another_kind_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(MisuseError, match="is no table of what algorithms took"):
        measured("all_reduce", 4, a_rank())


def test_a_file_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere.json"))
    with pytest.raises(MisuseError, match=r"PHALANX_TUNING=.*nowhere\.json cannot be read"):
        measured("all_reduce", 4, a_rank())
