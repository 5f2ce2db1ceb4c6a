"""The example of a parameter server: short, and it trains in every mode."""

from __future__ import annotations

from pathlib import Path

import parameter_server
import pytest

from phalanx import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"


def test_it_is_at_most_60_lines_long() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", parameter_server.MODES)
def test_every_mode_trains_with_a_worker_that_comes_late(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mode, steps = parameter_server.MODES[name], 12
    losses = simulate(lambda backend: parameter_server.train(backend, mode, steps=steps), 4)
    assert losses[0] < 2.0  # of 7 in the beginning
    assert (
        f"pushes of each worker: {{1: {steps}, 2: {steps}, 3: {steps}}}" in capsys.readouterr().out
    )


def test_one_rank_is_a_server_without_workers() -> None:
    simulate(
        lambda backend: parameter_server.train(backend, parameter_server.MODES["synchronous"]), 1
    )
