"""Write the table of torch's functions in docs/torch-backend.md from the results of their tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "torch_backend"))

from torch_functions import CHECKS, REFUSALS
from worlds import run

PAGE = Path(__file__).parents[2] / "docs" / "torch-backend.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
SIZES, KINDS = (2, 3), ("auto", "tcp", "hybrid")
HEAD = "| `torch.distributed` | shared memory | TCP | several hosts |\n|---|---|---|---|\n"


def row(name: str) -> str:
    cells = [
        "works"
        if all(passes(lambda rank, n=n: CHECKS[name](rank, n), n, kind) for n in SIZES)
        else ""
        for kind in KINDS
    ]
    return f"| `dist.{name}` | {' | '.join(cells)} |\n"


def refused(name: str) -> str:
    says = (REFUSALS[name].__doc__ or "").strip() or "By name."
    is_refused = passes(lambda rank: REFUSALS[name](rank, 2), 2, "auto")
    cell = f"refused. {says}" if is_refused else ""
    return f"| `dist.{name}` | {cell} | | |\n"


def passes(act: Callable[[int], None], size: int, kind: str) -> bool:
    try:
        run(act, size, kind=kind)
    except Exception as error:
        print(f"{error!r}", file=sys.stderr)
        return False
    return True


def table() -> str:
    return HEAD + "".join([*map(row, CHECKS), *map(refused, REFUSALS)])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
