"""torchdata's StatefulDataLoader, whose place is in the checkpoint for each rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from programs import HERE, LAUNCHERS, finish, needs, results, start

import phalanx

SAMPLES = 48  # 12 steps of 2 samples on 2 ranks


@needs("torchdata")
@pytest.mark.parametrize("killed_after", [5, 7])
def test_an_epoch_that_is_killed_goes_on_without_a_sample_lost_or_seen_twice(
    tmp_path: Path, killed_after: int
) -> None:
    """2 workers a rank read ahead; what was taken after the last checkpoint is taken again."""
    program = "data_loader_program.py"
    words = [str(HERE / program), str(tmp_path), str(SAMPLES)]
    killed = [*LAUNCHERS["phalanx run"](2), *words, str(killed_after)]
    code, out, _ = finish([killed], {})[0]
    assert code != 0
    last = phalanx.load_checkpoint(tmp_path)
    assert (last.step, last.world_size) == (killed_after - killed_after % 3, 2)
    assert len(last.own) == 2
    out += "\n" + start("phalanx run", program, *words[1:])
    seen = [int(number) for line in results(out) for number in line.split()]
    assert Counter(seen) == Counter(range(SAMPLES))
