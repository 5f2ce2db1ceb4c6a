"""Run the code cells of notebooks in this process, and store what they print.

    python tests/scripts/notebooks.py examples/exercises/*.ipynb

After a change in Jupyter: it leaves each file in the form in which the tests want it, with cells,
identifiers and printed text, and without counts, times and settings of an editor.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def cells_of(path: Path) -> list[Cell]:
    """Return a notebook's cells."""
    cells: list[Cell] = json.loads(path.read_text())["cells"]
    return cells


def printed(cell: Cell) -> str:
    """Return what is stored of a code cell's printed text."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run(cells: list[Cell]) -> list[str]:
    """Run the code cells, one after the other; return what each of them prints."""
    scope: dict[str, object] = {"__name__": "notebook"}
    texts = []
    for cell in cells:
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), f"{cell['id']}.py", "exec")
            with redirect_stdout(io.StringIO()) as out:
                exec(code, scope)
            texts.append(out.getvalue())
    return texts


def tidy(cells: list[Cell], texts: list[str]) -> str:
    """Return a notebook as a file has it, whose code cells print these texts."""
    left, tidied = iter(texts), []
    for number, cell in enumerate(cells):
        lines = "".join(cell["source"]).splitlines(keepends=True)
        new: Cell = {"cell_type": cell["cell_type"]}
        is_code = cell["cell_type"] == "code"
        if is_code:
            new["execution_count"] = None
        new |= {"id": f"cell-{number}", "metadata": {}}
        if is_code:
            text = next(left).splitlines(keepends=True)
            stream = {"name": "stdout", "output_type": "stream", "text": text}
            new["outputs"] = [stream] if text else []
        tidied.append(new | {"source": lines})
    notebook = {"cells": tidied, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        before = cells_of(path)
        path.write_text(tidy(before, run(before)))
