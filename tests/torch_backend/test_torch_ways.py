"""A stock program under launchers: see torch_ways.py, which runs all of them."""

from __future__ import annotations

import pytest
from forms import sizes
from torch_ways import LAUNCHERS, expected, run


@pytest.mark.parametrize("name", sizes(["torchrun"], [*LAUNCHERS]))
def test_a_program_that_says_phalanx_trains_like_one_process(name: str) -> None:
    """Its store outlives the process group under torchrun: a hundred rounds meet through it.

    Elsewhere it ends with rank 0's group, and a rank that is ahead would meet the one before.
    """
    assert expected() in run(name, rounds=sizes(20, 100) if name == "torchrun" else 1)
