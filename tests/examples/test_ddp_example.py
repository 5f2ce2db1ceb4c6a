"""The first example trains, alone and on two ranks, and all ranks end with the same model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from processes import run_job

from phalanx import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"


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


def test_it_runs_on_the_ranks_of_a_launcher() -> None:
    for rank, done in enumerate(run_job([str(EXAMPLE)], 2)):
        assert done.returncode == 0, done.stderr
        assert ("step 200  loss 0." in done.stdout) is (rank == 0)
        assert f"rank {rank} of 2: 9" in done.stdout
