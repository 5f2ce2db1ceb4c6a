"""What a backend remembers of earlier calls: plans, and which algorithm was chosen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from phalanx.backends.base import Backend

KEPT = 1024  # the oldest go first

T = TypeVar("T")


def remembered(backend: Backend, key: Hashable, make: Callable[[], T]) -> T:
    """The value that `make` gave for this key before, on this backend; else a new one."""
    memo = backend.plans
    value: T | None = memo.get(key)  # type: ignore[assignment]
    if value is None:
        value = make()
        if len(memo) >= KEPT:
            memo.pop(next(iter(memo)), None)
        memo[key] = value
    return value
