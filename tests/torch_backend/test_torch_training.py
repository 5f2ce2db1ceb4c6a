"""Training with torch's own wrappers, with the numbers of one process: see torch_training.py."""

from __future__ import annotations

import pytest
from torch_training import PROGRAMS, check
from worlds import run

from phalanx.torch_backend.process_group import VERSION

# torch 2.9: its stages send 8 bytes, and receive 4; it has warnings for itself.
BROKEN = {"pipeline_1f1b"} if VERSION == (2, 9) else set()
ON = {
    size: [name for name, each in PROGRAMS.items() if size in each.sizes and name not in BROKEN]
    for size in (2, 3, 4)
}
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


@pytest.mark.checkered
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ON[2])
def test_in_shared_memory(name: str, size: int) -> None:
    expected = PROGRAMS[name].expected(size)
    run(lambda rank: check(name, rank, size, expected[rank]), size)


@pytest.mark.checkered
@pytest.mark.parametrize("size", ON)
@pytest.mark.parametrize("kind", ["tcp", "hybrid", "auto"])
def test_all_in_one_world(kind: str, size: int) -> None:
    """Between hosts, too; on four ranks where two are not enough."""
    expected = {name: PROGRAMS[name].expected(size) for name in ON[size]}

    def act(rank: int) -> None:
        for name, states in expected.items():
            check(name, rank, size, states[rank])

    run(act, size, kind=kind)
