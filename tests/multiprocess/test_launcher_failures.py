"""What the user is told when a job fails."""

from __future__ import annotations

import resource
import socket
import subprocess
from pathlib import Path

import pytest
from launchers import RUN, Launch, environ_without_launcher, finish, run_script
from processes import run_python

ENDS_EARLY = """
import os, signal, sys
if os.environ["RANK"] == "1":
    {how}
from phalanx.launch.init import init
with init(timeout={timeout}):
    pass
"""


@pytest.mark.parametrize(
    ("how", "timeout", "code", "report"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 60, 137, "rank 1 was killed by signal 9"),
        ("sys.exit(0)", 2, 1, "rank 1 ended with exit code 0"),
    ],
)
def test_a_rank_that_ends_before_it_joins_is_named(
    tmp_path: Path, how: str, timeout: int, code: int, report: str
) -> None:
    script = ENDS_EARLY.format(how=how, timeout=timeout)
    with run_script(script, tmp_path) as launcher:
        returned, lines, errors = finish(launcher)
    assert (returned, lines) == (code, [])
    assert errors[-1].startswith(report)


def test_a_port_in_use_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        words = [*RUN, "--nnodes", "2", "--master", master, str(tmp_path / "script.py")]
        with Launch(words, tmp_path) as launcher:
            code, _, errors = finish(launcher)
    assert code == 2
    assert errors == [
        f"phalanx: node 0 cannot listen at {master}: the port is in use, perhaps by another job or "
        "one that has not ended: end it, or give --master another port, on every node"
    ]


def test_rank_0_by_hand_says_that_its_port_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code = "from phalanx.launch.init import init; init()"
        ended = run_python(["-c", code], environ={**environ_without_launcher(), **by_hand})
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("phalanx.errors.BackendUnavailableError: rank 0 cannot listen at ")
    assert f"127.0.0.1:{port}" in last
    assert "in use" in last
    assert "MASTER_PORT" in last


OUTPUT = r"""
import os, sys
rank = int(os.environ["RANK"])
if rank == 0:  # closes its output
    os.close(1)
    print("to stderr", file=sys.stderr)
if rank == 1:  # writes what is no text, and much of it
    sys.stdout.buffer.write(b"caf\xe9 \xff\n" * 100_000)
if rank == 2:  # ends in the middle of a line, and badly
    sys.stdout.write("no end")
    os._exit(7)
"""


def test_whatever_ranks_write_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OUTPUT)
    words = [*RUN, "-n", "3", str(script)]
    ended = subprocess.run(
        words, env=environ_without_launcher(), capture_output=True, check=False, timeout=60
    )
    lines = ended.stdout.splitlines()
    assert b"[rank 2] no end" in lines
    # Rank 1 may be stopped in the middle of a line, since rank 2 fails.
    assert all(b"[rank 1] caf\xe9 \xff".startswith(line) for line in lines if b"end" not in line)
    assert b"rank 2 failed: exit code 7; it left no traceback" in ended.stderr.splitlines()
    assert ended.returncode == 7


def no_room_for_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_a_full_disk_is_in_nobodys_way(tmp_path: Path) -> None:
    """The launcher needs no files: ranks start, and tell how they have failed."""
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('of its own')")
    ended = subprocess.run(
        [*RUN, str(script)],
        env=environ_without_launcher(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=no_room_for_files,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ValueError: of its own"


def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("for n in range(100_000): print('line', n)")
    with subprocess.Popen(
        [*RUN, "-n", "1", str(script)],
        env=environ_without_launcher(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert launcher.stdout.readline() == "[rank 0] line 0\n"
        launcher.stdout.close()
        assert launcher.stderr.read() == ""
    assert launcher.returncode == 0


def test_no_standard_streams_are_needed(tmp_path: Path) -> None:
    """As a daemon starts it. The ranks write more than a pipe holds."""
    script = tmp_path / "script.py"
    script.write_text(f"print('x' * 200_000)\nopen({str(tmp_path / 'done')!r}, 'w').close()")
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *RUN, "-n", "2", str(script)]
    ended = subprocess.run(words, env=environ_without_launcher(), check=False, timeout=60)
    assert ended.returncode == 0
    assert (tmp_path / "done").exists()


def test_no_home_and_no_path_are_needed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    ended = subprocess.run(
        [*RUN, "-n", "1", str(script)], env={}, capture_output=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"[rank 0] here\n", b"")
