"""Programs in forks of the tests' server are Python programs as others."""

from __future__ import annotations

import signal
from pathlib import Path

from processes import run_job, run_python

SAY = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ.get("SAID"), "torch" in sys.modules)
print("aside", file=sys.stderr)
sys.exit(3)
"""


def test_a_script_has_its_words_its_folder_and_its_environment(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(SAY)
    ended = run_python([str(script), "-x"], environ={"SAID": "yes"}, folder=tmp_path)
    said = f"__main__ {[str(script), '-x']} {tmp_path} yes True\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, said, "aside\n")


def test_text_and_modules_are_programs_as_well() -> None:
    assert run_python(["-c", "import sys; print(sys.argv)", "a"]).stdout == "['-c', 'a']\n"
    ended = run_python(["-m", "json.tool", "missing.json"])
    assert ended.returncode != 0
    assert "missing.json" in ended.stderr


def test_an_error_is_told_and_a_signal_is_the_exit_code() -> None:
    ended = run_python(["-c", "1 / 0"])
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
    killed = run_python(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    assert killed.returncode == -signal.SIGKILL


def test_the_ranks_of_a_job_meet() -> None:
    code = "import phalanx; backend = phalanx.init(); backend.barrier(); print(backend)"
    first, second = run_job(["-c", code], 2, PHALANX_LOG="warning")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout != second.stdout
