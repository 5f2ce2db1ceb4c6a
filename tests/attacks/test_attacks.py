"""A little of each attack of `make attack`, which a job has to hold off; no times are compared.

Hostile files are in tests/ops/interop/test_hostile_exports.py; `starts` measures times, which is
for a machine that does nothing else. Without root some say that they are skipped.
"""

from __future__ import annotations

import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from processes import run_job, run_python
from warm_python import warm_python

HERE = Path(__file__).parent
SHORT = {
    "forks": ["--short"],
    "store": ["--short", "torchrun_token"],
    "local_users": ["--short", "foreign_folder_of_a_watched_job"],
    "tls": ["--short", "plain"],
    "signals": ["--rounds", "20", "--seconds", "60"],
}


def play(name: str) -> str:
    """Return what it says if the job did not hold, or ""."""
    words = [str(HERE / f"{name}.py"), *SHORT[name]]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Another user's process is one of Python itself: forks are of the server's user.
    python = sys.executable if name == "local_users" else warm_python()
    ended = run_python(words, environ=environ, python=python)
    held = ended.returncode == 0 and (" of " in ended.stdout or "skipped" in ended.stdout)
    return "" if held else f"{name}: {ended.stdout}{ended.stderr}"


def test_a_job_holds_off_the_short_form_of_every_attack() -> None:
    with ThreadPoolExecutor(3) as pool:  # they wait more than they compute
        assert not "".join(pool.map(play, SHORT))


def test_a_parameter_server_holds_off_the_short_form_of_its_attacks() -> None:
    script = str(HERE / "parameter_server.py")
    attack = runpy.run_path(script)
    for case, mode in attack["SHORT"]:
        ranks = run_job([script, case, mode], 3)
        said = "".join(rank.stdout + rank.stderr for rank in ranks)
        assert attack["has_come"](case, mode, said), said
