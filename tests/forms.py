"""The tests' forms: the short one, at every change, and the long one, which tries more.

    make test                          the short form
    PHALANX_TESTS_LONG=1 make test     the long form
    make test-quick                    while editing: a minute, in one process

The short and the long one check the same promises; the long form tries them on more examples, and
at larger sizes. The quick one checks fewer: what runs in one process, on simulated ranks, and of
each test the first of its cases.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("PHALANX_TESTS_LONG", "0") not in ("", "0")
QUICK = os.environ.get("PHALANX_TESTS_QUICK", "0") not in ("", "0")
FEWER = 4  # times fewer examples in the short form
LEAST = 15  # examples
FEWEST = 4  # examples of the quick form


def examples(count: int) -> int:
    """How many examples hypothesis tries: so many in the long form."""
    if QUICK:
        return min(count, FEWEST)
    return count if LONG else min(count, max(LEAST, count // FEWER))


def sizes(short: T, long: T) -> T:
    """That of the two which belongs to the form of this run."""
    return long if LONG else short
