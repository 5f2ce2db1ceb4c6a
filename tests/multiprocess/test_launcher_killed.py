"""Nobody outlives a launcher that is killed; tests/scripts/launcher_bad_days.py says how soon."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from time import sleep

import pytest
from launchers import launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest.mark.parametrize("how", ["run", "spawn"])
def test_ranks_and_what_they_have_started_end_with_a_killed_launcher(
    tmp_path: Path, how: str
) -> None:
    with launch(how, "has processes of its own", tmp_path) as launcher:
        launcher.wait_for(2)
        launcher.process.kill()
        launcher.seconds_until_all_have_ended()
        assert not list(launcher.temporary.glob("phalanx-*"))


@pytest.mark.parametrize("seed", range(2))
def test_the_moment_does_not_matter(tmp_path: Path, seed: int) -> None:
    with launch("run", "hears no signal", tmp_path) as launcher:
        sleep(random.Random(seed).uniform(0, 2))
        launcher.process.kill()
        launcher.seconds_until_all_have_ended()
        assert not list(launcher.temporary.glob("phalanx-*"))
