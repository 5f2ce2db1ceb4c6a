"""How tests start the command line: as the module of this environment's package."""

from __future__ import annotations

import sys

PHALANX = [sys.executable, "-m", "phalanx"]
