"""What is refused, and in which words. Everything else has to be right.

A row: the ways, as a pattern of their names; the feature; a regular expression of the error's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from feature import Feature
    from wrappers import Way

FSDP = "FULL_SHARD* SHARD_GRAD_OP NO_SHARD hybrid *x?FULL_SHARD"

REFUSED = [
    ("LocalSGD* DiLoCo", "unfreezing", "was frozen when the module was wrapped: wrap it after"),
    (FSDP, "unused on one rank", "FSDP (reduces|averages) .* met .* FSDP (reduces|averages)"),
    ("DDP* LocalSGD* DiLoCo 1F1B?x?DDP", "meta device", "was given one on meta"),
    ("1F1B ZB-H1 1F1B?x?tensor", "shared parameters", "are one parameter, and a pipeline would"),
]


@cache
def _rows(way: str) -> dict[str, str]:
    return {
        feature: text
        for ways, feature, text in REFUSED
        if any(fnmatchcase(way, pattern) for pattern in ways.split())
    }


def refusal_of(way: Way, features: Sequence[Feature]) -> str | None:
    """What the error has to say, if one of these features is refused."""
    rows = _rows(way.name)
    return next((rows[one.name] for one in features if one.name in rows), None)
