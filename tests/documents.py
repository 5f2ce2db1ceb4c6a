"""README and the pages of docs/, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parent.parent
PAGES: Mapping[str, str] = MappingProxyType(
    {
        str(path.relative_to(ROOT)): path.read_text()
        for path in [
            *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
            *sorted((ROOT / "docs").rglob("*.md")),
        ]
    }
)


def blocks(language: str, page: str) -> list[str]:
    """The code of a page's blocks in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
