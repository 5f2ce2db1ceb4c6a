"""The first example trains, alone and on two ranks, and all ranks end with the same model."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"
ON_TWO_RANKS = [sys.executable, "-m", "phalanx.cli", "run", "-n", "2"]


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_two_ranks_end_with_the_same_model_and_learn_more_than_one() -> None:
    import ddp

    (alone,) = simulate(lambda backend: ddp.train(backend, steps=100), 1)
    first, second = simulate(lambda backend: ddp.train(backend, steps=100), 2)
    assert first == second
    assert first > 0.9
    assert first > alone - 0.02


def test_it_runs_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "step 200  loss 0." in out
    assert "rank 0 of 1: 9" in out


def test_it_runs_under_the_launcher() -> None:
    done = subprocess.run(
        [*ON_TWO_RANKS, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 200  loss 0." in done.stdout
    for rank in range(2):
        assert f"rank {rank} of 2: 9" in done.stdout
