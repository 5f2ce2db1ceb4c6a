"""The table of combinations as a program: `run.py --help`, or `table.py`, has its options.

Processes that a data loader spawns import this file once more: it has nothing that takes time.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    from table import main

    sys.exit(main())
