"""Each threshold of shared memory has a case that measures it, and its results are checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from clusters import SharedMemory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import shm_thresholds
from shm_thresholds import CASES, measure

from phalanx import Backend
from phalanx.collectives.shm import plan


@pytest.fixture(autouse=True)
def _thresholds_as_before(thresholds: Callable[..., None]) -> None:
    """A case leaves the last ones that it has tried."""
    thresholds()


def test_each_threshold_is_measured() -> None:
    assert tuple(CASES) == plan.Thresholds._fields


@pytest.mark.parametrize("name", CASES)
def test_a_case_gives_times_of_half_today_s_and_twice(name: str) -> None:
    """On one rank, whose results are checked in the same way."""
    [times] = SharedMemory().run(partial(measure, name=name, rounds=1), 1)
    assert len(times) == 3
    assert all(seconds > 0 for seconds in times)


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda case, tensor, backend: lambda: tensor.fill_(7.0)  # noqa: E731
    monkeypatch.setattr(shm_thresholds, "call_of", wrong)

    def run(backend: Backend) -> None:
        with pytest.raises(RuntimeError, match=r"rank 0: small x 0\.5: a wrong result"):
            measure(backend, "small", 1)

    SharedMemory().run(run, 1)
