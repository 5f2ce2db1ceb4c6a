"""Tests with other packages: `make test-clients` installs and runs them, `make test` does not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))  # for `launchers`
