"""All attacks, one after the other: `make attack`.

    python tests/attacks/run.py [--short] [NAME ...]

Each is a script that prints its own counts, and ends with 1 if an attack succeeded. The table at
the end has one row a script. Without root, those that need network namespaces or other users say
that they are skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType

TESTS = Path(__file__).parents[1]
SCRIPTS = MappingProxyType(
    {
        # name: the script, its arguments in the short form, and in the long one
        "starts": ("attacks/starts.py", ["--short"], []),
        "store": ("attacks/store.py", ["--short"], []),
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

APART = ("unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
"""What comes before a script that opens ports which strangers of its own call."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a little of each")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SCRIPTS)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - SCRIPTS.keys():
        parser.error(f"there is no attack {', '.join(sorted(unknown))}")
    rows, failed = [], 0
    for name in options.names or SCRIPTS:
        script, short, long = SCRIPTS[name]
        words = [sys.executable, str(TESTS / script), *(short if options.short else long)]
        if name == "store" and not os.geteuid():  # the others see to it themselves
            words = [*APART, *words]
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(words, check=False, env=environ).returncode
        failed += code != 0
        how = "held" if code == 0 else f"FAILED (exit code {code})"
        rows.append(f"{name:18} {how:24} {time.monotonic() - begin:6.1f} s")
    print("\n".join(["", *rows]))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
