"""The elastic example trains alone, and goes on when a rank of it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_python
from warm_python import warm_python

import phalanx

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"


def train(backend: phalanx.Backend) -> tuple[float, list[int]]:
    import elastic

    job = phalanx.Elastic(backend, min_ranks=2)
    right = elastic.train(job, steps=60)
    return right, [generation.world_size for generation in job.history]


def test_those_who_go_on_end_with_one_model_which_has_learnt_as_much() -> None:
    whole = phalanx.simulate(train, 3)
    assert whole[0] == whole[1] == whole[2]
    right, sizes = whole[0]
    assert right > 0.8
    assert sizes == [3]
    first, _, last = phalanx.simulate(train, 3, crashes={1: whole.turns[1] // 2})
    assert first == last == (pytest.approx(right, abs=0.02), [3, 2])


def test_it_runs_by_hand() -> None:
    done = run_python([str(EXAMPLE), "--steps", "51", "--pause", "0"])
    assert done.returncode == 0, done.stderr
    assert "step 50: loss 0." in done.stdout
    assert ", 1 ranks" in done.stdout
    assert "% right" in done.stdout


def test_a_rank_that_is_killed_is_lost_and_the_others_train_to_the_end() -> None:
    words = ["-m", "phalanx", "run", "-n", "3", "--min", "2", str(EXAMPLE)]
    words += ["--crash", "20", "--steps", "51", "--pause", "0"]
    done = run_python(words, python=warm_python())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was killed by signal 9" in done.stderr
    assert "generation 2: rank 1 (" in done.stderr
    assert "2 go on, 0 join, 0 steps done again" in done.stderr
    assert ", 2 ranks\n" in done.stdout
    assert done.stdout.count("% right") == 2
