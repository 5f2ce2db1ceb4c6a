"""Two hosts with two ranks each: what crosses between them is what the algorithms promise."""

from __future__ import annotations

import pytest
from hosts_apart import SharedHosts, measure
from networks import why_not

from phalanx import Backend, HybridBackend, TcpBackend

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
