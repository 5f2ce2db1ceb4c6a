"""A child that a rank forks while it logs scalars has no part in them."""

from __future__ import annotations

from pathlib import Path

from children import left, refused, said_by_child
from clusters import Tcp

from phalanx import Backend, Notice, Scalars


def test_a_child_leaves_scalars_and_notice_without_a_word(tmp_path: Path) -> None:
    def run(backend: Backend) -> str:
        with (
            Notice(backend, signals=()) as notice,
            Scalars(backend, [f"jsonl:{tmp_path}/a"], every=2) as scalars,
        ):
            for step in range(3):
                notice.given()
                scalars.log(step, loss=float(step))
            said = said_by_child(lambda: refused(lambda: scalars.log(3, loss=1.0)))
            said += said_by_child(lambda: left(scalars, notice))
            scalars.log(3, loss=3.0)
        return said

    assert Tcp().run(run, 2) == ["", ""]
    assert len((tmp_path / "a").read_text().splitlines()) == 2
