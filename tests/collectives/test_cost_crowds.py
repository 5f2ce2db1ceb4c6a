"""What algorithms are estimated to cost where ranks have to share processors."""

from __future__ import annotations

import pytest

from phalanx.collectives.cost import FORMULAS, seconds
from phalanx.core.transport import INSIDE_A_HOST

SIZES = [8 << (3 * k) for k in range(9)]


def cheapest(size: int, count: int, processors: float) -> str:
    """Of the algorithms of all_reduce."""
    times = {
        name: seconds(formula(size, count), INSIDE_A_HOST, size, processors)
        for name, formula in FORMULAS["all_reduce"].items()
    }
    return min(times, key=times.__getitem__)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("count", SIZES)
def test_with_a_processor_for_each_rank_nobody_waits_for_one(size: int, count: int) -> None:
    for formulas in FORMULAS.values():
        for formula in formulas.values():
            work = formula(size, count)
            assert seconds(work, INSIDE_A_HOST, size, size) == seconds(work, INSIDE_A_HOST)
            assert seconds(work, INSIDE_A_HOST, size, size - 1) >= seconds(work, INSIDE_A_HOST)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_in_a_crowd_small_tensors_go_by_few_messages_and_large_ones_by_few_bytes(size: int) -> None:
    assert cheapest(size, 8, 2) == "star"
    assert cheapest(size, 1 << 20, 2) == "tree"
    assert cheapest(size, 64 << 20, 2) in ("ring", "halving_doubling")
