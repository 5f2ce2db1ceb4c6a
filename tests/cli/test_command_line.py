"""The command line as a process: what it imports, and what it prints for others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launchers import environ_without_launcher

from phalanx import AuthenticationError
from phalanx.transport.tcp.admission import check_token


def test_the_command_line_does_not_wait_for_torch() -> None:
    # The package's own __init__ is left out: what it imports is its business.
    check = (
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('phalanx')\n"
        "sys.modules['phalanx'] = importlib.util.module_from_spec(spec)\n"
        "import phalanx.cli.app, phalanx.cli.main\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("words", [["-m", "phalanx", "run"], ["-m", "phalanx.launch"]])
def test_a_script_that_is_not_there_is_named(words: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, *words, "-n", "2", "missing.py"],
        env=environ_without_launcher(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("phalanx: the script missing.py is not there")


def test_the_help_needs_neither_torch_nor_a_launcher() -> None:
    program = (
        "import sys; from phalanx.cli.app import app; app(['--help'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'ssl', 'phalanx.launch.run'} & {*sys.modules}))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert b"Train PyTorch models" in shown.stdout


def test_the_way_to_make_one_makes_one() -> None:
    with pytest.raises(AuthenticationError, match="Make one with phalanx token") as info:
        check_token("", "it")
    command = str(info.value).rpartition("Make one with ")[2]
    words = [sys.executable, "-m", "phalanx", *command.split()[1:]]
    made = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert len(check_token(made.strip(), "it")) == 64
