"""The tables of the documents that say what works with other packages, made from the tests.

    python tests/clients/tables.py      writes them into the documents

A table stands between `<!-- its name -->` and `<!-- end of its name -->`; tests compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pinned() -> dict[str, str]:
    """The versions that the tests are run with."""
    constraints = (ROOT / "constraints.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", constraints, flags=re.MULTILINE))


def tried(name: str, package: str) -> str:
    """The first cell of a row: what it is, and the version that was tried."""
    return f"{name}: `{package}` {pinned()[package]}"


def as_markdown(first: str, rows: Iterable[Sequence[str]]) -> str:
    """A table, the first column of which is of such things and their versions."""
    head = f"| {first}, version tried | how | what works | what is refused |\n|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def between(document: str, name: str) -> re.Match[str]:
    """Where the table of this name stands in a document."""
    pattern = rf"(?<=<!-- {name} -->\n\n)(.*?)(?=\n<!-- end of {name} -->)"
    found = re.search(pattern, document, flags=re.DOTALL)
    assert found is not None, f"the document has no place for the table of {name}"
    return found


def tables() -> dict[str, tuple[Path, str]]:
    """By its name where each table stands, and its text."""
    import files_and_loggers
    import trainers

    rows = map(trainers.cells, trainers.TRAINERS)
    more = map(files_and_loggers.cells, files_and_loggers.FILES_AND_LOGGERS)
    return {
        "trainers": (ROOT / "docs/clusters.md", as_markdown("trainer", rows)),
        "files and loggers": (
            ROOT / "docs/files-and-loggers.md",
            as_markdown("file or logger", more),
        ),
    }


if __name__ == "__main__":
    for name, (page, table) in tables().items():
        document = page.read_text()
        start, end = between(document, name).span()
        page.write_text(document[:start] + table + document[end:])
