"""Training with torch's own wrappers, with the numbers of one process: see torch_training.py."""

from __future__ import annotations

import pytest
import torch
from torch_training import PROGRAMS, check, power_sgd
from worlds import run

EACH = [(name, size) for name, program in PROGRAMS.items() for size in program.sizes]


@pytest.mark.parametrize(("name", "size"), EACH)
def test_in_shared_memory(name: str, size: int) -> None:
    expected = PROGRAMS[name].expected(size)
    run(lambda rank: check(name, rank, size, expected[rank]), size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["tcp", "hybrid"])
def test_all_between_hosts(kind: str, size: int) -> None:
    expected = {name: PROGRAMS[name].expected(size) for name, count in EACH if count == size}

    def act(rank: int) -> None:
        for name, states in expected.items():
            check(name, rank, size, states[rank])

    run(act, size, kind=kind)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["auto", "tcp", "hybrid"])
def test_power_sgd_s_hook_ends_with_equal_parameters(kind: str, size: int) -> None:
    first, *others = run(lambda rank: power_sgd(rank, size), size, kind=kind)
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())
