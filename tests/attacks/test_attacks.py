"""A little of each attack of `make attack`, which a job has to hold off; no times are compared.

Hostile files are in tests/ops/interop/test_hostile_exports.py; `starts` measures times, which is
for a machine that does nothing else. Without root some say that they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SHORT = {
    "forks": ["--short"],
    "parameter_server": ["--short"],
    "store": ["--short", "torchrun_token"],
    "local_users": ["--short", "foreign_folder_of_a_watched_job"],
    "tls": ["--short", "plain"],
    "signals": ["--rounds", "20", "--seconds", "60"],
}


def play(name: str) -> str:
    """Return what it says if the job did not hold, or ""."""
    ended = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *SHORT[name]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    held = ended.returncode == 0 and (" of " in ended.stdout or "skipped" in ended.stdout)
    return "" if held else f"{name}: {ended.stdout}{ended.stderr}"


def test_a_job_holds_off_the_short_form_of_every_attack() -> None:
    with ThreadPoolExecutor(3) as pool:  # they wait more than they compute
        assert not "".join(pool.map(play, SHORT))
