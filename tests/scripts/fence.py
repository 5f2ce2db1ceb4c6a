"""The library's own tests, with a copy of the package that has neither `ops/` nor `cli/`.

make fence            all of them
make fence ARGS=-x    with options of pytest
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "multiprocess"))
sys.path.insert(0, str(Path(__file__).parent.parent))

from test_fence import copy_library, own_tests

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        copy_library(Path(folder))
        words = [sys.executable, "-m", "pytest", *map(str, own_tests()), *sys.argv[1:]]
        environ = {**os.environ, "PYTHONPATH": folder}
        sys.exit(subprocess.run(words, env=environ, check=False).returncode)
