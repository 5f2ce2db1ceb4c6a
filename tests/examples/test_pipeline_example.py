from __future__ import annotations

from pathlib import Path

import pytest
from pipeline import train

import phalanx as px

SCRIPT = Path(__file__).parents[2] / "examples" / "pipeline.py"


def test_the_pipeline_example_trains_as_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    (plain,) = px.simulate(lambda backend: train(backend, 8, 1, "gpipe"), 1)
    piped = px.simulate(lambda backend: train(backend, 8, 4, "1f1b"), 3)
    assert piped[0] == piped[1] == piped[2] == pytest.approx(plain, rel=1e-3)
    assert plain[-1] < plain[0]
    shown = capsys.readouterr().out
    assert shown.count("step 8  loss 0.") == 2
    assert shown.count("held-out loss 0.") == 2
    assert "in theory 33.3%" in shown


def test_the_pipeline_example_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 60
