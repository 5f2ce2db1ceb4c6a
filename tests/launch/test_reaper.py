from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx.launch.reaper as reaper_program
from phalanx.launch.reaper import Reaper, end_session

SLEEPER = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]

LAUNCHER = """
import os, sys, time
from phalanx.launch.reaper import Reaper
reaper = Reaper(sys.argv[1])
for pid in sys.argv[2:]:
    reaper.hold(int(pid))
reaper.release(int(sys.argv[-1]))
os.kill(os.getpid(), 9)
"""


def test_a_killed_launchers_reaper_kills_what_is_there_and_removes_the_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "working"
    (folder / "deep" / "er").mkdir(parents=True)
    *sleepers, released = (subprocess.Popen(SLEEPER, start_new_session=True) for _ in range(4))
    try:
        told = [str(sleeper.pid) for sleeper in (*sleepers, released)]
        words = [sys.executable, "-c", LAUNCHER, str(folder), *told]
        assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
        assert [sleeper.wait(30) for sleeper in sleepers] == [-signal.SIGKILL] * 3
        assert released.poll() is None
    finally:
        released.kill()
        released.wait()
    while folder.exists():  # it is removed after them
        os.sched_yield()


def test_a_reaper_that_is_closed_harms_nobody(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(SLEEPER, start_new_session=True)
    try:
        with Reaper(str(tmp_path)) as reaper:
            reaper.hold(sleeper.pid)
        assert sleeper.poll() is None
        assert tmp_path.is_dir()
        reaper.hold(sleeper.pid)  # a closed one takes nothing more
        reaper.close()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_reaper_that_was_killed_is_no_error() -> None:
    with Reaper() as reaper:
        process = reaper._process
        assert process is not None
        process.kill()
        process.wait()
        reaper.hold(1)
        reaper.release(1)


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_numbers_that_mean_many_processes_end_none(
    pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: calls.append(pid))
    monkeypatch.setattr(os, "killpg", lambda pid, _: calls.append(pid))
    end_session(pid)
    assert calls == []


def test_the_reapers_program_needs_nothing_but_python() -> None:
    words = [sys.executable, "-I", "-S", str(reaper_program.__file__), "0", ""]
    assert subprocess.run(words, check=False, stdin=subprocess.DEVNULL).returncode == 0
