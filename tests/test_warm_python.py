"""What launchers start by `warm_python` is Python, to the launcher and to itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run_python
from waiting import wait_until
from warm_python import warm_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(*words: str, **how: Any) -> tuple[int, str, str]:
    command = [warm_python(), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    return ended.returncode, ended.stdout, ended.stderr


def test_it_has_its_words_its_folder_its_environment_and_its_input(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "import os, sys\n"
        "print(__name__, sys.argv, os.getcwd(), os.environ['SAID'])\n"
        "print(sys.stdin.read(), os.getppid())\n"
        "print('torch' in sys.modules, sys.executable, file=sys.stderr)\n"
    )
    code, said, aside = run(str(script), "-x", cwd=tmp_path, env={"SAID": "yes"}, input="heard")
    place = f"{[str(script), '-x']} {tmp_path} yes\nheard {os.getpid()}"
    assert (code, said, aside) == (0, f"__main__ {place}\n", f"True {warm_python()}\n")


def test_its_end_is_that_of_its_process() -> None:
    assert run("-c", "import sys; sys.exit(7)") == (7, "", "")
    assert run("-c", "import os; os._exit(3)") == (3, "", "")
    assert run("-c", "import sys; sys.exit('no')") == (1, "", "no\n")
    code, _, said = run("-c", "1 / 0")
    assert (code, said.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    for number in (signal.SIGKILL, signal.SIGSEGV):
        assert run("-c", f"import os; os.kill(os.getpid(), {int(number)})")[0] == -number
    at_exit = "import atexit; atexit.register(print, 'over'); print('said')"
    assert run("-c", at_exit) == (0, "said\nover\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_stand_in_ends_the_process(number: signal.Signals) -> None:
    words = [
        warm_python(),
        "-c",
        "import os, signal; print(os.getpid(), flush=True); signal.pause()",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stand_in:
        assert stand_in.stdout is not None
        process = Path("/proc", stand_in.stdout.readline().strip())
        assert process.name != str(stand_in.pid)
        stand_in.send_signal(number)
        assert stand_in.wait() == -number
    wait_until(lambda: not process.exists(), "the process has ended")


def test_descriptors_have_the_numbers_that_they_were_given() -> None:
    ours, theirs = os.pipe()
    wrong = run("-c", f"import os; os.write({theirs}, b'here')", pass_fds=[theirs])
    assert wrong == (0, "", "")
    os.close(theirs)
    assert os.read(ours, 10) == b"here"
    os.close(ours)


def test_other_options_are_python_s_own() -> None:
    assert run("-I", "-S", "-c", "import sys; print('torch' in sys.modules)") == (0, "False\n", "")


def test_ranks_that_a_launcher_starts_meet(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text("import phalanx, sys\nwith phalanx.init() as b: print(b.world_size)\n")
    ended = run_python(["-m", "phalanx", "run", "-n", "2", str(script)], python=warm_python())
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] 2", "[rank 1] 2"]
