"""Where a rank is on its host: its number there, its device; and what one rank alone prints."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from phalanx import Backend, SimulatedBackend, simulate
from phalanx.core.device import device_of


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, int], None]:
    """Lets torch say that this host has so many accelerators of a kind."""

    def let_it_have(kind: str | None, count: int) -> None:
        accelerator = SimpleNamespace(type=kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return let_it_have


def test_ranks_of_a_host_are_counted_and_groups_keep_the_jobs_numbers() -> None:
    world = SimulatedBackend.create_group(4)
    for backend in world:
        backend.topology = (0, 1, 0, 1)
    assert [backend.local_rank for backend in world] == [0, 0, 1, 1]
    assert [world[rank].subgroup([2, 3]).local_rank for rank in (2, 3)] == [1, 1]


@pytest.mark.parametrize(
    ("kind", "count", "ranks", "expected"),
    [
        (None, 0, 1, "cpu"),
        ("cuda", 0, 1, "cpu"),
        ("cuda", 4, 4, "cuda:1"),
        ("cuda", 3, 4, "cpu"),  # one of the host's ranks would have none
        ("mps", 4, 2, "cpu"),  # its tensors cannot be moved
    ],
)
def test_a_rank_has_the_accelerator_of_its_number_if_each_has_one(
    accelerators: Callable[[str | None, int], None],
    kind: str | None,
    count: int,
    ranks: int,
    expected: str,
) -> None:
    accelerators(kind, count)
    assert str(device_of(1, ranks)) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]), (1, ["cuda:0", "cpu", "cpu", "cpu"])],
)
def test_a_backend_asks_for_all_ranks_of_its_host(
    accelerators: Callable[[str | None, int], None], count: int, expected: list[str]
) -> None:
    """Of three ranks, two on one host; and a group of the last of them."""
    accelerators("cuda", count)
    world = SimulatedBackend.create_group(3)
    for backend in world:
        backend.topology = (0, 1, 1)
    assert [str(each.device) for each in (*world, world[2].subgroup([2]))] == expected


def test_rank_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def run(backend: Backend) -> None:
        backend.print("loss", backend.rank, sep="=", end="!")

    simulate(run, 3)
    assert capsys.readouterr().out == "loss=0!"
