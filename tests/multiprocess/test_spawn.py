"""`spawn` over real processes; what needs none is in tests/launch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx.core.backend import Backend
from phalanx.errors import PeerLostError
from phalanx.launch.binding import threads_per_rank
from phalanx.launch.report import RankTraceback
from phalanx.launch.spawn import spawn


def pass_right(backend: Backend) -> tuple[int, torch.Tensor, str]:
    sent, received = torch.full((3,), float(backend.rank)), torch.empty(3)
    right, left = (backend.rank + 1) % backend.world_size, backend.rank - 1
    backend.send(sent, right)
    backend.recv(received, left % backend.world_size)
    return backend.rank, received, os.environ["OMP_NUM_THREADS"]


def fail_on_rank_1(backend: Backend, *, how: str) -> None:
    if backend.rank == 1:
        if how == "raise":
            raise ZeroDivisionError("on rank 1 alone")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # only an exception that is no Exception ends this
        try:
            backend.recv(torch.empty(1), 1)
        except Exception:
            continue


def test_results_come_in_rank_order_and_tensors_outlive_their_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    results = spawn(pass_right, 2)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert [tensor.tolist() for _, tensor, _ in results] == [[1.0] * 3, [0.0] * 3]
    assert {threads for _, _, threads in results} == {str(threads_per_rank(2))}
    assert "OMP_NUM_THREADS" not in os.environ


def test_the_root_cause_is_raised_and_ranks_that_swallow_errors_are_stopped() -> None:
    with pytest.raises(ZeroDivisionError, match="on rank 1 alone") as caught:
        spawn(partial(fail_on_rank_1, how="raise"), 2)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "fail_on_rank_1" in caught.value.__cause__.text


def test_a_rank_that_is_killed_is_named_with_its_signal() -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 .* signal 9 \(SIGKILL\)") as caught:
        spawn(partial(fail_on_rank_1, how="kill"), 2)
    assert caught.value.peer == 1


DAEMON = """
import pathlib, sys
from phalanx.launch.spawn import spawn

def rank(backend):
    print("a line")
    return backend.rank

if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(str(spawn(rank, 2)))
"""


def test_a_daemon_whose_standard_streams_are_closed_can_spawn(tmp_path: Path) -> None:
    script, results = tmp_path / "daemon.py", tmp_path / "results"
    script.write_text(DAEMON)
    words = [sys.executable, str(script), str(results)]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], check=True, timeout=60)
    assert results.read_text() == "[0, 1]"


UNGUARDED = """
from phalanx.launch.spawn import spawn

def rank(backend):
    return backend.rank

spawn(rank, 2)
"""


def test_a_script_that_calls_spawn_when_it_is_imported_is_told_in_one_error(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    told = ended.stderr.splitlines()[-1]
    assert told.startswith("phalanx.errors.MisuseError: ")
    assert 'if __name__ == "__main__":' in told
    assert "Rank " in ended.stderr, "the traceback of the rank that failed first"
    assert "freeze_support" not in ended.stderr
    assert ended.stderr.count("Traceback (most recent call last)") == 2


SLEEPERS = """
import os, signal, time
from phalanx.launch.spawn import spawn

def sleep(backend):
    os.write(1, b"ready\\n")  # in one piece
    time.sleep(600)

if __name__ == "__main__":
    # What a shell has started in the background ignores SIGINT, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spawn(sleep, 1)
"""


def test_ctrl_c_is_the_parents_and_ends_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
        # The ranks hold this pipe too: its end is theirs.
        _, errors = parent.communicate(timeout=30)
    assert parent.returncode == -signal.SIGINT
    assert errors.count("KeyboardInterrupt") == 1
