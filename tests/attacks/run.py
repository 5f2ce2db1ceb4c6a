"""All attacks, one after the other: `make attack`.

    python tests/attacks/run.py [--short] [NAME ...]

Each is a script that prints its own counts, and ends with 1 if an attack succeeded. Those that
measure how long a job takes to form run alone; the others two at a time, and what they say is shown
when they have ended. The table at the end has one row a script. Without root, those that need
network namespaces or other users say that they are skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType

TESTS = Path(__file__).parents[1]
SCRIPTS = MappingProxyType(
    {
        # name: the script, its arguments in the short form, and in the long one
        "starts": ("attacks/starts.py", ["--short"], ["--rounds", "2"]),
        "store": ("attacks/store.py", ["--short"], ["--count", "5"]),
        "tls": ("attacks/tls.py", ["--short"], []),
        "files": ("attacks/files.py", ["--short"], []),
        "local users": ("attacks/local_users.py", ["--short"], []),
        "parameter server": ("attacks/parameter_server.py", ["--short"], []),
        "forks": ("attacks/forks.py", ["--short"], []),
        "signals": ("attacks/signals.py", ["--short"], []),
        "handshakes": ("wire/wire_fuzz.py", ["--seconds", "2"], ["--seconds", "15"]),
        "a rank that lies": ("backends/link_fuzz.py", ["--seconds", "2"], ["--seconds", "45"]),
        "a crowd": ("backends/acceptor_flood.py", ["--ranks", "2", "--runs", "1"], ["--runs", "3"]),
    }
)
"""The first eight were written against doors that were open once; the rest held from the start."""

ALONE = ("starts", "store", "a crowd")
"""Those that compare times."""

APART = ("unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
"""What comes before a script that opens ports which strangers of its own call."""


def run(name: str, *, short: bool, shown: bool) -> tuple[int, str, str]:
    """Return its exit code, its row, and what it has said if that is not shown already."""
    script, brief, long = SCRIPTS[name]
    words = [sys.executable, str(TESTS / script), *(brief if short else long)]
    if name == "store" and not os.geteuid():  # the others see to it themselves
        words = [*APART, *words]
    begin = time.monotonic()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    to = None if shown else subprocess.PIPE
    done = subprocess.run(
        words, check=False, env=environ, stdout=to, stderr=to and subprocess.STDOUT, text=True
    )
    how = "held" if done.returncode == 0 else f"FAILED (exit code {done.returncode})"
    row = f"{name:18} {how:24} {time.monotonic() - begin:6.1f} s"
    return done.returncode, row, done.stdout or ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a little of each")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SCRIPTS)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - SCRIPTS.keys():
        parser.error(f"there is no attack {', '.join(sorted(unknown))}")
    names, found = options.names or list(SCRIPTS), []
    for name in names:
        if name in ALONE:
            print(f"== {name}", flush=True)
            found.append(run(name, short=options.short, shown=True))
    with ThreadPoolExecutor(2) as pool:
        rest = [name for name in names if name not in ALONE]
        brief = partial(run, short=options.short, shown=False)
        for name, ended in zip(rest, pool.map(brief, rest), strict=True):
            print(f"== {name}\n{ended[2]}", end="", flush=True)
            found.append(ended)
    print("\n".join(["", *(row for _, row, _ in found)]))
    return int(any(code for code, _, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
