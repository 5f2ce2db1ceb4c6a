"""Waiting for what has to come: the tests have this one loop that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 60.0  # seconds, for a machine on which much else runs


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], object] = "it comes",
    *,
    patience: float = PATIENCE,
    pause: float = 0.01,
) -> T:
    """Call `condition` again and again; return its result as soon as that is true.

    It may raise, if waiting has no use any more. When `patience` seconds have passed, that is an
    `AssertionError` with `what`; a function is asked then.
    """
    deadline = time.monotonic() + patience
    while not (result := condition()):
        if time.monotonic() >= deadline:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {patience:g} s until {said}")
        time.sleep(pause)
    return result
