"""What benchmarks/loss_against_bytes.py and benchmarks/slow_link.py share.

rows.py       the ways to train that are compared: a table
training.py   one run: the language-model example, trained in one of these ways
runs.py       what came of it, and the file in which that is kept
summary.py    what the runs of a row say together: medians, and how they compare with dense
tables.py     as tables
pictures.py   as a picture
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # whose model and text they use
