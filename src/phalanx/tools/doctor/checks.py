"""What one check has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "info", "warn", "fail"]
"""`info` is neither good nor bad; with `fail` something does not work here."""


@dataclass(frozen=True)
class Finding:
    """The result of one check, in words for the user and for a bug report."""

    status: Status
    what: str
    hint: str = ""
    """What to do about it."""


Check = Callable[[], Finding]
Checks = Mapping[str, Check]


def ok(what: str) -> Finding:
    """Return that all is well."""
    return Finding("ok", what)


def info(what: str, hint: str = "") -> Finding:
    """Return what is so, without a judgement."""
    return Finding("info", what, hint)


def warn(what: str, hint: str) -> Finding:
    """Return what may become a trouble, and what to do."""
    return Finding("warn", what, hint)


def fail(what: str, hint: str) -> Finding:
    """Return what does not work, and what to do."""
    return Finding("fail", what, hint)
