"""What all tests share: the clusters, and how hypothesis behaves."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that any test may import `clusters`

from clusters import CLUSTERS
from forms import examples

from phalanx.backends.engine import group as group_module
from phalanx.backends.engine import operation as operation_module

hypothesis.settings.register_profile(
    "phalanx", deadline=None, derandomize=True, max_examples=examples(100)
)
hypothesis.settings.load_profile("phalanx")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeouts: of the clusters, only those in which time passes")
    config.addinivalue_line("markers", "requires(what): only clusters that do not lack this")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `cluster` is run on every kind of backend."""
    if "cluster" not in metafunc.fixturenames:
        return
    time_passes = metafunc.definition.get_closest_marker("timeouts") is not None
    required = {what for m in metafunc.definition.iter_markers("requires") for what in m.args}
    chosen = [
        cluster
        for cluster in CLUSTERS
        if (cluster.keeps_time or not time_passes) and not required & cluster.lacks.keys()
    ]
    metafunc.parametrize("cluster", chosen, ids=[c.name.replace(" ", "_") for c in chosen])


@pytest.fixture
def asking_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait in a collective ask after a tenth of a second whether others are in it, too.

    Where most of a file's tests would only wait for that. The half second of every day passes in
    test_conformance_agreement.py, and wherever ranks are processes.
    """
    for module in (operation_module, group_module):
        monkeypatch.setattr(module, "ASK_EVERY", 0.1)
