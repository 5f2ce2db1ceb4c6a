"""Sizes of messages, as they are asked for and shown: `8..256M`, `8,64K,16M`. K is 1024."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from phalanx.errors import MisuseError

__all__ = ["parse_size", "parse_sizes", "show_size"]

_UNITS: Mapping[str, int] = MappingProxyType({"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30})
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """`"64K"` -> 65536. `MisuseError` for what is no size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise MisuseError(f"{text!r} is no size of a message: write bytes, such as 8, 64K or 16M")
    return int(found[1]) * _UNITS[found[2].upper()]


def parse_sizes(text: str, factor: int = 8) -> list[int]:
    """Bytes, ascending, each once: of a list whose parts are sizes or ranges.

    A range `8..256M` holds its first size, `factor` times that, and so on, and its last.
    `MisuseError` for what is neither, a range that falls, and a factor below 2.
    """
    if factor < 2:
        raise MisuseError(f"--factor {factor}: sizes of a range have to grow, by 2 or more")
    sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size = parse_size(first)
        end = parse_size(last) if dots else size
        if end < size:
            raise MisuseError(f"{part!r} falls: write the smaller size first")
        while size < end:
            sizes.add(size)
            size *= factor
        sizes.add(end)
    return sorted(sizes)


def show_size(size: int) -> str:
    """65536 -> `"64K"`; what is no round number of units stays a number of bytes."""
    for unit in ("G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)
