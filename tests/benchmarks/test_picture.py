"""The picture of what `phalanx bench --json` has written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.ops.bench.report import BenchReport, as_json
from phalanx.ops.bench.request import Entry, ResultLine, make_request

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import picture


def line(peer: str, size: int) -> ResultLine:
    entry, seconds = Entry(peer), [1e-5, 1.2e-5]
    return ResultLine(
        operation="all_reduce", ranks=4, bytes=size, entry=entry, calls=3, seconds=seconds, bus=1.5
    )


def test_the_picture_is_drawn_of_the_figures_of_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(["all_reduce"], backends="tcp,gloo", sizes="8,1M", beside=1)
    report = BenchReport(request, [4], {})
    for size in (8, 512, 1 << 20):
        for peer in ("tcp", "gloo", "copy"):
            report.add(line(peer, size))
    (tmp_path / "figures.json").write_bytes(as_json(report))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["picture.py", "figures.json", "plot.png"])
    picture.main()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_no_known_form_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["picture.py", "figures.json", "x.foo"])
    with pytest.raises(SystemExit):
        picture.main()
    assert "a picture is a file of one of" in capsys.readouterr().err
