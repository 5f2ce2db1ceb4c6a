"""The short examples of compression and aggregation do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import simulate

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["compression.py", "aggregation.py"])
def test_they_are_short(name: str):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60


def test_compressed_training_is_as_good_and_sends_less():
    import compression

    def run(kind: str) -> tuple[float, int]:
        made = compression.COMPRESSORS[kind]
        return simulate(lambda backend: compression.train(backend, made, 60), 2)[0]

    dense, dense_bytes = run("dense")
    for kind, times in {
        "PowerSGD of rank 2, error feedback": 6,
        "1 bit, error feedback": 25,
        "top 1 %, error feedback": 70,
    }.items():
        loss, nbytes = run(kind)
        assert loss < 1.15 * dense
        assert nbytes * times < dense_bytes
    assert run("top 1 %")[0] > 1.3 * dense  # what error feedback is for


@pytest.mark.parametrize("kind", ["all_reduce", "parameter_server", "top_k"])
def test_every_aggregator_trains(kind: str, monkeypatch: pytest.MonkeyPatch, capsys):
    import aggregation

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert aggregation.main(kind, epochs=2) < 0.5
    assert "epoch 1: mean loss" in capsys.readouterr().out
