"""Ranks on several hosts, in every way: for each rank the number of its host."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import strategies as st
from schedule_proof import ROWS

from phalanx.collectives.schedules import Hosts, Send, row_for, schedule

EQUAL = [
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 0, 1, 1, 1, 2, 2, 2),
    (2, 0, 1, 1, 2, 0, 2, 0, 1),
    tuple(rank // 8 for rank in range(16)),
    tuple(rank % 4 for rank in range(16)),
]
UNEQUAL = [
    (0, 1, 1),
    (0, 0, 0, 1),
    (1, 0, 1, 1, 0, 1),
    (0, 1, 1, 1, 2, 2),
    (7, 3, 3, 5, 7, 3, 3),
    (0,) * 5 + (1,) * 3 + (2,) * 7,
]
ONE_EACH = [(0, 1), (0, 1, 2), (3, 2, 1, 0), tuple(range(7))]
ONE_HOST = [(0,), (4,), (0, 0), (1, 1, 1), (0,) * 8]
ALL = [*EQUAL, *UNEQUAL, *ONE_EACH, *ONE_HOST]

TWO_LEVEL = [collective for collective, algorithm in ROWS if algorithm == "two_level"]

every_two_level = pytest.mark.parametrize("collective", TWO_LEVEL)
on_all_hosts = pytest.mark.parametrize("hosts", ALL, ids=lambda hosts: "".join(map(str, hosts)))
on_equal_hosts = pytest.mark.parametrize(
    "hosts", [*EQUAL, *ONE_EACH], ids=lambda hosts: "".join(map(str, hosts))
)

topologies = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(tuple)


def crossing(
    collective: str, algorithm: str, hosts: Hosts, root: int = 0
) -> tuple[Counter[int], Counter[int]]:
    """The share of the tensor that leaves each host, and that comes in, as fractions."""
    size = len(hosts)
    part = Fraction(1, row_for(collective, algorithm, hosts, root).chunks(size))
    out: Counter[int] = Counter()
    in_: Counter[int] = Counter()
    for rank in range(size):
        for steps in schedule(collective, algorithm, rank, size, root, hosts):
            for step in steps:
                if type(step) is Send and hosts[step.peer] != hosts[rank]:
                    out[hosts[rank]] += step.count * part  # type: ignore[assignment]
                    in_[hosts[step.peer]] += step.count * part  # type: ignore[assignment]
    return out, in_
