"""The doctor over real processes; what needs none is in test_doctor.py."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from forms import sizes
from launchers import environ_without_launcher
from processes import run_python
from warm_python import warm_python

from phalanx.ops.observe.doctor import try_backend

# Two ranks of every backend take a while: in the short form, of one that works anywhere and of one
# that tells why it does not work here. That every backend has its row is seen in test_doctor.py.
DOCTOR = """
import sys
from phalanx.cli.app import run_checks
from phalanx.ops.observe.doctor import CHECKS

names = ("tcp", "nccl", "process groups")
checks = [check for check in CHECKS if check.section != "Backends" or check.name in names]
if __name__ == "__main__":
    sys.exit(run_checks(checks, as_json=False))
"""


def test_the_doctor_tries_the_backends_and_keeps_the_token_to_itself(tmp_path: Path) -> None:
    token = "4fe1" * 16
    script = tmp_path / "doctor.py"
    script.write_text(DOCTOR)
    words = sizes([str(script)], ["-m", "phalanx", "doctor"])
    environ = {**environ_without_launcher(), "PHALANX_TOKEN": token}
    ended = run_python(words, environ=environ, python=warm_python())
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "- tcp: 2 ranks: barrier " in ended.stdout
    assert "- nccl: " in ended.stdout
    assert "PHALANX_TOKEN: set, 64 characters" in ended.stdout
    assert token not in ended.stdout


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(int(entry.name))
    return found


def test_a_backend_that_takes_too_long_has_failed_and_its_ranks_are_gone() -> None:
    before = children()
    finding = try_backend("tcp", bound=0.2)
    assert (finding.status, finding.what) == ("fail", "TimeoutError: it took more than 0.2 s")
    assert children() <= before
