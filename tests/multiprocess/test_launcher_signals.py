"""A launcher that is told to end does so once, says so in one line, and leaves nobody."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest
from launchers import RUN, Launch, environ_without_launcher, finish, launch, run_script
from ports import unused_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

STUBBORN = """
import pathlib, signal, sys
ready = pathlib.Path(sys.argv[1])
try:
    (ready / "0").touch()
    signal.pause()
except KeyboardInterrupt:
    (ready / "1").touch()
    signal.pause()
"""


def ready(folder: Path) -> str:
    (folder / "ready").mkdir()
    return str(folder / "ready")


@pytest.mark.parametrize(
    ("name", "what"),
    [("SIGINT", "has processes of its own"), ("SIGTERM", "sleeps"), ("SIGINT", "hears no signal")],
)
def test_a_signal_ends_everything_with_one_line(tmp_path: Path, name: str, what: str) -> None:
    with launch("run", what, tmp_path, "--max-restarts", "1") as launcher:
        launcher.wait_for(2)
        launcher.process.send_signal(signal.Signals[name])
        assert finish(launcher) == (128 + signal.Signals[name], [], [f"stopped by {name}"])
        launcher.seconds_until_all_have_ended()
        assert not list(launcher.temporary.glob("phalanx-*"))


def test_a_second_signal_does_not_wait_for_the_ranks(tmp_path: Path) -> None:
    with run_script(STUBBORN, tmp_path, ready(tmp_path), ranks=1) as launcher:
        launcher.wait_for(1)
        launcher.process.send_signal(signal.SIGINT)
        launcher.wait_for(2)  # it is cleaning up, and takes its time
        launcher.process.send_signal(signal.SIGINT)
        assert finish(launcher) == (130, [], ["stopped by SIGINT"])
        launcher.seconds_until_all_have_ended()


def test_a_launcher_that_waits_for_other_nodes_can_be_interrupted(tmp_path: Path) -> None:
    """It waits in torch's store, which does not look for signals."""
    (tmp_path / "script.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        master = f"127.0.0.1:{silent.getsockname()[1]}"
        options = ["--nnodes", "2", "--node-rank", "1", "--master", master]
        words = [*RUN, *options, str(tmp_path / "script.py")]
        with Launch(words, tmp_path) as launcher:
            silent.settimeout(60)
            with silent.accept()[0]:  # now it waits for an answer
                launcher.process.send_signal(signal.SIGINT)
                assert finish(launcher) == (130, [], ["stopped by SIGINT"])
                launcher.seconds_until_all_have_ended()
        assert not list(launcher.temporary.glob("phalanx-*"))


def test_a_hangup_that_was_to_be_ignored_is_ignored(tmp_path: Path) -> None:
    """As under nohup, which ignores SIGHUP for the program that it starts. SIGUSR1 comes later."""
    nohup = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "pathlib.Path(sys.argv[1], '0').touch()\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        "print('went on')\n"
    )
    words = [*RUN, "-n", "1", str(script), ready(tmp_path)]
    start = [sys.executable, "-c", f"{nohup}os.execv(sys.argv[1], sys.argv[1:])", *words]
    with Launch(start, tmp_path, environ_without_launcher()) as launcher:
        launcher.wait_for(1)
        launcher.process.send_signal(signal.SIGHUP)
        launcher.process.send_signal(signal.SIGUSR1)
        assert finish(launcher) == (0, ["[rank 0] went on"], [])


# ------------------------------------------------------------------------------
# Ranks that leave: they end with exit code 75 after a notice, which is no failure.

LEAVES = """
import os, pathlib, signal, sys, time

def leave(signum, frame):
    {save}
    sys.exit(75)

for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), leave)
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
signal.pause()
"""
AGAIN = "the ranks have left; exit code 75: start the job again"


def leave(folder: Path, save: str, *options: str) -> Launch:
    """Two ranks that `save` when they are told to leave."""
    script = folder / "script.py"
    script.write_text(LEAVES.format(save=save))
    words = [*RUN, "-n", "2", *options, str(script), ready(folder)]
    launcher = Launch(words, folder)
    launcher.wait_for(2)
    return launcher


@pytest.mark.parametrize(
    ("name", "save"), [("SIGTERM", "time.sleep(2.5)"), ("SIGTERM", "pass"), ("SIGUSR1", "pass")]
)
def test_ranks_that_leave_after_a_signal_are_not_started_again(
    tmp_path: Path, name: str, save: str
) -> None:
    with leave(tmp_path, save, "--max-restarts", "1") as launcher:
        launcher.process.send_signal(signal.Signals[name])
        assert finish(launcher) == (75, [], [AGAIN])
        launcher.seconds_until_all_have_ended()


def test_ranks_that_leave_by_themselves_are_not_started_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(75 if os.environ['RANK'] == '1' else 0)\n")
    words = [*RUN, "-n", "2", "--max-restarts", "1", str(script)]
    with Launch(words, tmp_path) as launcher:
        assert finish(launcher) == (75, [], [AGAIN])


def test_ranks_that_take_longer_than_the_grace_are_killed(tmp_path: Path) -> None:
    with leave(tmp_path, "signal.pause()", "--grace", "0.2") as launcher:
        launcher.process.send_signal(signal.SIGTERM)
        assert finish(launcher) == (143, [], ["stopped by SIGTERM"])
        launcher.seconds_until_all_have_ended()


def test_an_error_while_they_leave_is_shown(tmp_path: Path) -> None:
    with leave(tmp_path, "raise OSError('no space left')") as launcher:
        launcher.process.send_signal(signal.SIGTERM)
        code, _, errors = finish(launcher)
    assert code == 143
    assert errors[-2:] == ["OSError: no space left", "stopped by SIGTERM"]


def test_all_nodes_leave_with_the_one_that_was_told_to(tmp_path: Path) -> None:
    """Rank 0, on another node, hears of it from rank 1, as by a `Notice`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "told = pathlib.Path(sys.argv[1]).parent / 'told'\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.touch())\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).touch()\n"
        "while not told.exists(): time.sleep(0.01)\n"
        "sys.exit(75)\n"
    )
    master = f"127.0.0.1:{unused_port()}"
    folder = ready(tmp_path)
    words = [*RUN, "--nnodes", "2", "--master", master, "--max-restarts", "1"]
    with (
        Launch([*words, "--node-rank", "0", str(script), folder], tmp_path) as zero,
        Launch([*words, "--node-rank", "1", str(script), folder], tmp_path) as one,
    ):
        zero.wait_for(2)
        one.process.send_signal(signal.SIGTERM)
        assert finish(zero) == (75, [], [AGAIN])
        assert finish(one) == (75, [], [AGAIN])


def test_a_script_that_spawns_leaves_nobody_when_it_is_terminated(tmp_path: Path) -> None:
    with launch("spawn", "has processes of its own", tmp_path) as launcher:
        launcher.wait_for(2)
        launcher.process.send_signal(signal.SIGTERM)
        assert finish(launcher) == (-signal.SIGTERM, [], [])
        launcher.seconds_until_all_have_ended()
