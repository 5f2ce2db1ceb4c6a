"""docs/recipes.md and the files of examples/recipes/: what the page runs, and what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from documents import PAGES, ROOT

PAGE = PAGES["docs/recipes.md"]
FILES = {path.name: path.read_text() for path in sorted((ROOT / "examples/recipes").glob("*.py"))}
PROMPT = re.compile(r"^```console\n([^`]+)```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Section(NamedTuple):
    """A recipe of the page: its files, the lines of them that are shown, and what is run."""

    title: str
    files: list[str]
    lines: list[str]
    runs: list[tuple[list[str], str]]  # some commands, and the output of them all


def sections() -> list[Section]:
    """The recipes in the order of the page."""
    found = []
    for text in PAGE.split("\n### ")[1:]:
        code = re.findall(r"^```py\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        runs = [(commands.splitlines(), shown) for commands, shown in PROMPT.findall(text)]
        files = sorted(set(re.findall(r"`examples/recipes/(\w+\.py)`", text)))
        found.append(Section(text.split("\n")[0], files, code, runs))
    return found


def same(found: str, shown: str) -> bool:
    """Whether lines are those that the page shows. Numbers with a point may differ by rounding."""
    ours, its = (re.sub(r"^\[rank 0\] ", "", text, flags=re.MULTILINE) for text in (found, shown))
    ours, its = (re.sub(r" *\n", "\n", text).strip() for text in (ours, its))
    decimal = r"(?<![\w.])\d+\.\d+"
    numbers, others = ([float(n) for n in re.findall(decimal, text)] for text in (ours, its))
    return (
        re.sub(decimal, "#", ours) == re.sub(decimal, "#", its)
        and len(numbers) == len(others)
        and all(abs(a - b) <= 0.01 * abs(b) for a, b in zip(numbers, others, strict=True))
    )


def script(command: str) -> tuple[int, str]:
    """The number of ranks on this host, and the file of a command."""
    number = re.search(r" -n (\d+) ", command)
    (name,) = re.findall(r"examples/recipes/(\w+\.py)", command)
    return int(number[1]) if number else 1, name


def path(name: str) -> Path:
    """Where a recipe is."""
    return ROOT / "examples" / "recipes" / name
