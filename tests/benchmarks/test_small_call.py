"""The path of a small call is stamped where it goes, and its parts are told."""

from __future__ import annotations

import re
from pathlib import Path

from processes import run_python
from warm_python import warm_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "small_call.py"


def test_the_parts_of_a_call_take_about_what_the_whole_call_takes() -> None:
    """They are a little more: each stamp takes time, too."""
    words = ["-m", "phalanx", "run", "-n", "2", str(SCRIPT), "--calls", "20", "--rounds", "2"]
    ended = run_python(words, python=warm_python())
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(r"^\[rank 0\] \| (.+) \| ([\d.]+) \|$", ended.stdout, re.MULTILINE)
    names = [name for name, _ in rows]
    assert names[:3] == ["whole", "by hand", "sum"]
    assert len(names) == 9
    assert all(float(us) > 0 for _, us in rows)
