from __future__ import annotations

import json
from pathlib import Path

from language_model_runs import ROOT, SCRIPT, TINY, checkpoints, write_text
from processes import run_python
from warm_python import warm_python


def test_it_runs_over_real_processes_as_the_readme_says(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = [
        *TINY,
        f"--data={write_text(tmp_path)}",
        f"--out={out}",
        "--steps=6",
        "--strategy=full_shard",
    ]
    words = ["-m", "phalanx", "run", "-n", "2", str(SCRIPT), *options]
    done = run_python(words, folder=ROOT, python=warm_python())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank 0] held-out loss" in done.stdout
    assert "[rank 1]" not in done.stdout
    log = json.loads((out / "log.json").read_text())
    assert log["world_size"] == 2
    assert len(log["steps"]) == 6
    assert checkpoints(out) == ["000001-step-6"]
