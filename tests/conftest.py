"""What all tests share: the clusters, and how hypothesis behaves.

What imports torch is imported by those who need it: the process that only hands out tests does not.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

# Small tensors, many ranks, and as many tests at a time as cores: torch's threads would only wait
# for each other, and for other tests. Before anything imports torch, and for processes, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent / "multiprocess"))  # what several folders import
sys.path.insert(0, str(Path(__file__).parent / "checkpoint"))
sys.path.insert(0, str(Path(__file__).parent))  # so that any test may import `clusters`

from checkered import split
from forms import LONG, QUICK, examples, is_slow, quick
from together import Together

if TYPE_CHECKING:
    from phalanx.launch.run import Job

hypothesis.settings.register_profile(
    "phalanx", deadline=None, derandomize=True, max_examples=examples(100)
)
hypothesis.settings.load_profile("phalanx")

# Where the kernel allows it, memory is read however slowly: which way is taken does not go by time.
os.environ.setdefault("PHALANX_CMA", "allow")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeouts: of the clusters, only those in which time passes")
    config.addinivalue_line("markers", "wide: also as many ranks are connected, each with a few")
    config.addinivalue_line("markers", "requires(what): only clusters that do not lack this")
    config.addinivalue_line("markers", "together: on all clusters at a time: it mostly waits")
    config.addinivalue_line("markers", "checkered: some of the combinations of its parameters")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The quick form does not even import the files that it leaves out."""
    return True if QUICK and is_slow(collection_path.name) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `cluster` is run on every kind of backend."""
    if "cluster" not in metafunc.fixturenames:
        return
    from clusters import CLUSTERS, Wide

    time_passes = metafunc.definition.get_closest_marker("timeouts") is not None
    required = {what for m in metafunc.definition.iter_markers("requires") for what in m.args}
    wide = [Wide()] if metafunc.definition.get_closest_marker("wide") is not None else []
    chosen = [
        cluster
        for cluster in [*CLUSTERS, *wide]
        if (cluster.keeps_time or not time_passes) and not required & cluster.lacks.keys()
    ]
    if QUICK:
        chosen = chosen[:1]  # the simulated one, if the test can run there
    by_name = metafunc.config.getoption("keyword")  # -k: then each cluster is a test, with its name
    together = metafunc.definition.get_closest_marker("together") is not None and not by_name
    if len(chosen) > 1 and together:
        metafunc.parametrize("cluster", [Together(chosen)], ids=["together"])
    else:
        metafunc.parametrize("cluster", chosen, ids=[c.name.replace(" ", "_") for c in chosen])


@pytest.hookimpl(trylast=True)  # after -k, so that it finds any test
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not LONG:
        items[:], left = quick(items) if QUICK else split(items)
        config.hook.pytest_deselected(items=left)


def pytest_collectstart() -> None:
    """What twelve thousand tests consist of lives to the end: the garbage collector skips it."""
    gc.disable()
    gc.freeze()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is given clusters that come together is called once for each of them."""
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for name, value in given.items():
        if isinstance(value, Together):
            value.run_each(lambda cluster, name=name: pyfuncitem.obj(**{**given, name: cluster}))
            return True
    return None


@pytest.fixture
def asking_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait in a collective ask after a tenth of a second whether others are in it, too.

    Where most of a file's tests would only wait for that. The half second of every day passes in
    test_conformance_agreement.py, and wherever ranks are processes.
    """
    from clusters import Cluster

    monkeypatch.setattr(Cluster, "ask_every", 0.1)


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets from which sizes on collectives in shared memory go which way, during a test."""
    from phalanx.collectives.shm import plan

    return lambda **sizes: monkeypatch.setattr(plan, "THRESHOLDS", plan.Thresholds(**sizes))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that a command line asks for; none is run, and each ends with exit code 5."""
    import phalanx.launch.run as launcher

    jobs: list[Job] = []

    def note(job: Job) -> int:
        jobs.append(job)
        return 5

    monkeypatch.setattr(launcher, "run", note)
    return jobs


@pytest.fixture(autouse=True, scope="module")
def _what_has_lived_so_far_lives_on() -> Iterator[None]:
    """So does what is left after each file: a collection takes a tenth of a second else."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """No test leaves the log of the others at another level."""
    log = logging.getLogger("phalanx")
    before = log.level, log.propagate, log.disabled
    yield
    log.setLevel(before[0])
    log.propagate, log.disabled = before[1:]
