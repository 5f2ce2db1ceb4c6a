"""The functions of torch.distributed, each in its forms: see torch_functions.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch_functions import CHECKS, REFUSALS
from worlds import run


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_function(name: str, size: int) -> None:
    run(lambda rank: CHECKS[name](rank, size), size)


@pytest.mark.parametrize("kind", ["tcp", "hybrid"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_functions_between_hosts(kind: str, size: int) -> None:
    def act(rank: int) -> None:
        for function in CHECKS.values():
            function(rank, size)

    run(act, size, kind=kind)


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    run(lambda rank: REFUSALS[name](rank, 2), 2)


def test_the_table_of_the_docs_has_every_function_as_its_tests_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "torch-backend.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `dist.")]
    works = [f"| `dist.{name}` | works | works | works |" for name in CHECKS]
    refused = [f"| `dist.{name}` | refused." for name in REFUSALS]
    assert [row for row in rows if row in works] == works
    assert [start for start in refused if any(row.startswith(start) for row in rows)] == refused
