"""A test on several clusters at a time fails if it fails on any of them, and says on which."""

from __future__ import annotations

import pytest
from clusters import Cluster, Simulated, Tcp
from processes import run_python
from together import Together

from phalanx import Backend


@pytest.mark.parametrize("culprit", ["simulated", "tcp"])
def test_every_cluster_is_tried_and_a_failure_on_one_is_raised(culprit: str) -> None:
    tried = []

    def test(cluster: Cluster) -> None:
        def be_a_rank(backend: Backend) -> int:
            if cluster.name == culprit and backend.rank == 1:
                pytest.fail("it is wrong here")
            return backend.rank

        tried.append(cluster.name)
        cluster.run(be_a_rank, 2)

    with pytest.raises(pytest.fail.Exception, match="it is wrong here") as info:
        Together([Simulated(), Tcp()]).run_each(test)
    assert sorted(tried) == ["simulated", "tcp"]
    notes = getattr(info.value, "__notes__", [f"on the cluster {culprit}"])  # since Python 3.11
    assert f"on the cluster {culprit}" in notes


@pytest.mark.together
def test_a_test_that_is_marked_is_called_with_one_cluster_after_all(cluster: Cluster) -> None:
    assert isinstance(cluster, Cluster)
    assert cluster.run(lambda backend: backend.rank, 2) == [0, 1]


def test_with_k_each_cluster_is_a_test_of_its_own() -> None:
    """So that one of them can be looked at with a debugger."""
    pytest_k = ["-m", "pytest", "--collect-only", "-q", "-k", "is_marked and tcp"]
    shown = run_python([*pytest_k, __file__]).stdout
    assert "one_cluster_after_all[tcp]" in shown
    assert "[together]" not in shown
