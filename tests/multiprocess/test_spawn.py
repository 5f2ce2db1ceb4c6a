"""`spawn` over real processes; what needs none is in tests/launch."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from processes import run_python
from test_training import alone, train_on_my_rows
from warm_python import warm_python

import phalanx
from phalanx.core.backend import Backend
from phalanx.errors import MisuseError, PeerLostError
from phalanx.launch.binding import threads_per_rank
from phalanx.launch.report import RankTraceback
from phalanx.launch.spawn import spawn


def pass_right(backend: Backend) -> tuple[int, torch.Tensor, str, tuple[list[float], list[float]]]:
    sent, received = torch.full((3,), float(backend.rank)), torch.empty(3)
    right, left = (backend.rank + 1) % backend.world_size, backend.rank - 1
    backend.send(sent, right)
    backend.recv(received, left % backend.world_size)
    for turn in range(backend.world_size):
        backend.barrier()
        if turn == backend.rank:
            print(f"line of {backend.rank}")
            print(f"error of {backend.rank}", file=sys.stderr)
    return backend.rank, received, os.environ["OMP_NUM_THREADS"], train_on_my_rows(backend)


def fail_on_rank_1(backend: Backend) -> None:
    if backend.rank == 1:
        raise ZeroDivisionError("on rank 1 alone")
    while True:  # only an exception that is no Exception ends this
        try:
            backend.recv(torch.empty(1), 1)
        except Exception:
            continue


def join_once_more(backend: Backend) -> list[str]:
    told = []
    for joins in (phalanx.init, phalanx.Elastic):
        with pytest.raises(MisuseError) as error:
            joins()
        told.append(str(error.value))
    return told


def kill_itself(backend: Backend) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks, which have imported torch."""
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.mark.usefixtures("warm")
def test_results_come_in_rank_order_and_lines_go_to_an_object_that_is_stdout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors outlive their rank; each line stands behind its rank; they train like one process."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        results = spawn(pass_right, 2)
    assert out.getvalue() == "[rank 0] line of 0\n[rank 1] line of 1\n"
    assert err.getvalue() == "[rank 0] error of 0\n[rank 1] error of 1\n"
    ranks, tensors, threads, trained = zip(*results, strict=True)
    assert ranks == (0, 1)
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 3, [0.0] * 3]
    assert set(threads) == {str(threads_per_rank(2))}
    for mine in trained:
        for found, expected in zip(mine, alone(), strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.usefixtures("warm")
def test_the_root_cause_is_raised_and_ranks_that_swallow_errors_are_stopped() -> None:
    with pytest.raises(ZeroDivisionError, match="on rank 1 alone") as caught:
        spawn(fail_on_rank_1, 2)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "fail_on_rank_1" in caught.value.__cause__.text


@pytest.mark.usefixtures("warm")
def test_a_rank_has_its_backend_and_does_not_train_alone_beside_the_others() -> None:
    for rank, told in enumerate(spawn(join_once_more, 2)):
        assert all(f"this is rank {rank} of 2 of phalanx.spawn" in text for text in told)


@pytest.mark.usefixtures("warm")
def test_a_rank_that_is_killed_is_named_with_its_signal() -> None:
    with pytest.raises(PeerLostError, match=r"rank 0 .* signal 9 \(SIGKILL\)") as caught:
        spawn(kill_itself, 1)
    assert caught.value.peer == 0


def test_without_cloudpickle_a_lambda_is_refused_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
    with pytest.raises(MisuseError) as caught:
        spawn(lambda backend: backend.rank, 2)
    assert "at the top level of a module" in str(caught.value)
    assert "pip install 'phalanx[notebook]'" in str(caught.value)


CONSOLE = """
import sys
import phalanx
sys.modules["cloudpickle"] = None
def rank(backend): return 0

try: phalanx.spawn(rank, 1)
except phalanx.MisuseError as error: print(error)
"""


def test_without_cloudpickle_a_function_of_a_console_is_refused_before_anything_starts() -> None:
    ended = run_python(["-c", CONSOLE])  # like a console, it has a `__main__` without a file
    assert ended.returncode == 0, ended.stderr
    assert "it is defined in a notebook or console" in ended.stdout
    assert "pip install 'phalanx[notebook]'" in ended.stdout


# No `if __name__ == "__main__":`, since ranks do not import this module.
BY_VALUE = """
import phalanx

class Pair:
    def __init__(self, first, second):
        self.first, self.second = first, second

class Broken(Exception):
    pass

def check(rank):
    if rank == 1:
        raise Broken("on purpose")

def spawn(offset, fail=False):
    def add(backend):
        if fail:
            check(backend.rank)
        return Pair(backend.rank, backend.rank + offset)
    return phalanx.spawn(add, 2)

pairs = spawn(10)
assert all(type(pair) is Pair for pair in pairs)
assert [(pair.first, pair.second) for pair in pairs] == [(0, 10), (1, 11)]
try:
    spawn(10, fail=True)
except Broken as error:
    assert 'raise Broken("on purpose")' in error.__cause__.text
"""


def test_closures_and_classes_of_a_script_go_and_come_by_value(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle (the extra `notebook`) is not installed")
    script = tmp_path / "script.py"
    script.write_text(BY_VALUE)
    ended = run_python([str(script)], python=warm_python())
    assert ended.returncode == 0, ended.stderr


DAEMON = """
import pathlib, sys
from phalanx.launch.spawn import spawn

def rank(backend):
    print("a line")
    return backend.rank

if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(str(spawn(rank, 1)))
"""


def test_a_daemon_whose_standard_streams_are_closed_can_spawn(tmp_path: Path) -> None:
    script, results = tmp_path / "daemon.py", tmp_path / "results"
    script.write_text(DAEMON)
    words = [sys.executable, str(script), str(results)]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], check=True, timeout=60)
    assert results.read_text() == "[0]"


UNGUARDED = """
from phalanx.launch.spawn import spawn

def rank(backend):
    return backend.rank

spawn(rank, 1)
"""


def test_a_script_that_calls_spawn_when_it_is_imported_is_told_in_one_error(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    ended = run_python([str(script)], python=warm_python())
    assert ended.returncode == 1
    told = ended.stderr.splitlines()[-1]
    assert told.startswith("phalanx.errors.MisuseError: ")
    assert 'if __name__ == "__main__":' in told
    assert "Rank " in ended.stderr, "the traceback of the rank that failed first"
    assert "freeze_support" not in ended.stderr
    assert ended.stderr.count("Traceback (most recent call last)") == 2


WAITERS = """
import os, signal
from phalanx.launch.spawn import spawn

def wait(backend):
    os.write(1, b"ready\\n")  # in one piece
    signal.pause()

if __name__ == "__main__":
    # What a shell has started in the background ignores SIGINT, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spawn(wait, 1)
"""


def test_ctrl_c_is_the_parents_and_ends_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "waiters.py"
    script.write_text(WAITERS)
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
