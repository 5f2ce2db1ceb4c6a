"""Parts of pages that programs write: what stands between two marks in a page.

<!-- begin: NAME -->
<!-- end: NAME -->
"""

from __future__ import annotations

import re
from pathlib import Path

from phalanx import files


def rewrite(page: Path, name: str, part: str) -> None:
    """Put `part` between the page's marks of that name."""
    before, _, after = split(page.read_text(), name)
    begin, end = marks(name)
    files.write(str(page), f"{before}{begin}\n\n{part.strip()}\n\n{end}{after}".encode())


def split(text: str, name: str) -> tuple[str, str, str]:
    """Return what stands before the marks, between, and after. ValueError without such marks."""
    begin, end = marks(name)
    before, rest = text.split(begin)
    part, after = rest.split(end)
    return before, part.strip(), after


def marks(name: str) -> tuple[str, str]:
    """Return the marks at which a part begins and ends."""
    return f"<!-- begin: {name} -->", f"<!-- end: {name} -->"


def short_system(name: str) -> str:
    """Return a system's name with two numbers of its version: `Linux 6.12 x86_64`."""
    return re.sub(r"(\d+\.\d+)\S*", r"\1", name, count=1)
