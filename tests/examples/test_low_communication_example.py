"""The short example of training with few messages does what it says."""

from __future__ import annotations

from pathlib import Path

from phalanx import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "low_communication.py"


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_ranks_that_meet_seldom_learn_as_much_and_send_less():
    import low_communication

    def run(way: str) -> tuple[float, int]:
        first, second = simulate(lambda backend: low_communication.train(backend, way, 100), 2)
        assert first == second
        return first

    (dense, dense_bytes), *others = [run(way) for way in low_communication.WAYS]
    for (loss, nbytes), times in zip(others, (7, 14, 150), strict=True):
        assert loss < 1.1 * dense
        assert nbytes * times < dense_bytes
