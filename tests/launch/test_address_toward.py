from __future__ import annotations

from phalanx.launch.environment import address_toward


def test_ranks_of_one_host_stay_on_it() -> None:
    assert address_toward("node1.invalid", 29500, one_host=True) == "127.0.0.1"
