"""The functions of torch.distributed, each in its forms: see torch_functions.py."""

from __future__ import annotations

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
