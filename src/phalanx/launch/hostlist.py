"""Slurm's short form of many host names: `node[003-005,9]`."""

from __future__ import annotations

import re
from itertools import product

__all__ = ["expand_hosts"]

_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts that `text` stands for, in its order; `ValueError` if it is no host list.

    `node[003-005,9],gpu1` is `node003 node004 node005 node9 gpu1`: the first number of a range
    says how wide its numbers are. A name may have several brackets.
    """
    names = _NAME.findall(text)
    if not names or _NAME.sub("", text).strip(", "):
        raise ValueError(f"{text!r} is not a list of hosts such as node[003-005,9],gpu1")
    return [host for name in names for host in _expand_name(name)]


def _expand_name(name: str) -> list[str]:
    choices = [
        _expand_numbers(numbers) if plain == "" else [plain]
        for numbers, plain in _PART.findall(name)
    ]
    return ["".join(parts) for parts in product(*choices)]


def _expand_numbers(numbers: str) -> list[str]:
    expanded: list[str] = []
    for item in numbers.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"[{numbers}] is not a list of numbers such as [003-005,9]")
        first, last = match[1], match[2] or match[1]
        expanded += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    if not expanded:
        raise ValueError(f"[{numbers}] holds no number: a range runs from low to high")
    return expanded
