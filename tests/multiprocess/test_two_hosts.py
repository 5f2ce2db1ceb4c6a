"""Two hosts with two ranks each: what crosses between them is what the algorithms promise.

And the smallest run of `make links`: two hosts with a rank each, on a link that delays.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hosts_apart import SharedHosts, measure
from networks import why_not

from phalanx import Backend, HybridBackend, TcpBackend

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import links
from linked_hosts import NoLinkError

COUNT = 2 << 20  # bytes


@pytest.fixture(autouse=True)
def _networks_are_allowed() -> None:
    if why_not():
        pytest.skip(why_not())


@pytest.mark.parametrize("kind", [TcpBackend, HybridBackend])
def test_each_host_sends_its_data_once(kind: type[Backend]) -> None:
    with SharedHosts(2, 2) as network:
        reports = measure(network, COUNT, ["two_level", "direct"], 1, None, kind)
    for topology, figures, _ in reports:
        assert topology[0] == topology[1] != topology[2] == topology[3]
        # What else crosses: headers, acknowledgements, two barriers.
        assert 1.0 <= figures["two_level"].sent / COUNT <= 1.15
        assert 2.0 <= figures["direct"].sent / COUNT <= 2.3


def test_ranks_are_measured_on_a_link_with_a_delay() -> None:
    try:
        found = links.measure("1G+1ms", ["--sizes", "8", "--rounds", "1"])
    except NoLinkError as error:
        pytest.skip(f"no hosts can be joined here: {error}")
    assert [one.operation for one in found] == ["all_reduce", "stream"]
    assert [(one.bytes, one.wrong) for one in found] == [(8, 0)] * 2
    assert min(found[0].seconds.values()) > 1e-3  # no all_reduce is over before a packet arrives
