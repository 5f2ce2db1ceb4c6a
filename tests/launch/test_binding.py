"""Which rank runs on which cores, on machines that are described by files as Linux has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.errors import MisuseError
from phalanx.launch import binding
from phalanx.launch.binding import bind, cores_by_node, shares
from phalanx.launch.run import Job


def machine(folder: Path, nodes: dict[str, str], siblings: dict[int, str]) -> Path:
    """`/sys/devices/system` of a machine: its memory nodes, and the threads beside each thread."""
    for name, processors in nodes.items():
        (folder / "node" / name).mkdir(parents=True)
        (folder / "node" / name / "cpulist").write_text(f"{processors}\n")
    for number, beside in siblings.items():
        (folder / f"cpu/cpu{number}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{number}/topology/thread_siblings_list").write_text(f"{beside}\n")
    return folder


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two nodes of two cores of two hardware threads; numbers as many machines have them."""
    siblings = {number: f"{number % 4},{number % 4 + 4}" for number in range(8)}
    return machine(tmp_path, {"node0": "0-1,4-5", "node1": "2-3,6-7", "node10": ""}, siblings)


def test_a_core_is_all_of_its_hardware_threads(two_nodes: Path) -> None:
    assert cores_by_node(frozenset(range(8)), two_nodes) == [
        [{0, 4}, {1, 5}],
        [{2, 6}, {3, 7}],
    ]


def test_only_what_a_container_leaves_counts(two_nodes: Path) -> None:
    assert cores_by_node(frozenset({1, 3, 6, 7}), two_nodes) == [[{1}], [{3, 7}, {6}]]
    assert cores_by_node(frozenset({5}), two_nodes) == [[{5}]]


def test_without_a_word_of_the_system_each_processor_is_a_core_of_one_node(tmp_path: Path) -> None:
    assert cores_by_node(frozenset({0, 3}), tmp_path) == [[{0}, {3}]]


def sets(text: str) -> list[frozenset[int]]:
    return [frozenset(map(int, part)) for part in text.split()]


@pytest.mark.parametrize(
    ("parts", "ranks", "expected"),
    [
        ("0 1 2 3 4 5 6 7", 1, "01234567"),
        ("0 1 2 3 4 5 6 7", 3, "01 23 45"),  # as many for each: 6 and 7 stay free
        ("0 1 2 3", 4, "0 1 2 3"),
        ("0123 4567", 2, "0123 4567"),
        ("0123 4567", 3, "0123 0123 4567"),  # more ranks than nodes: neighbours share one
        ("0123 4567", 5, "0123 0123 0123 4567 4567"),
        ("01 23 45", 2, "01 23"),
    ],
)
def test_each_rank_gets_as_much_as_any_other(parts: str, ranks: int, expected: str) -> None:
    assert shares(sets(parts), ranks) == sets(expected)


def test_more_ranks_than_cores_are_refused_and_numa_lets_them_share() -> None:
    cores = frozenset(os.sched_getaffinity(0))
    with pytest.raises(MisuseError, match=rf"{len(cores) + 1} ranks need a core each"):
        bind("cores", len(cores) + 1)
    assert frozenset().union(*bind("numa", len(cores) + 1)) <= cores


def test_a_way_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(MisuseError, match="--bind sockets: it is one of cores, numa"):
        bind("sockets", 2)


def test_a_system_without_affinity_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.setattr(binding.platform, "system", lambda: "Darwin")
    with pytest.raises(MisuseError, match="needs Linux: Darwin lets no program choose its cores"):
        bind("cores", 1)


def test_a_job_that_cannot_be_bound_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    with pytest.raises(MisuseError, match="--bind sockets"):
        Job(2, str(tmp_path / "script.py"), bind="sockets").check()
